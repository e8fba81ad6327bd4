"""The table of checks: for ``ddtree doctor --list`` and docs/doctor.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from ddtree_ops.doctor import checks as _registered  # noqa: F401  importing registers the checks
from ddtree_ops.doctor.active import ACTIVE
from ddtree_ops.doctor.check import CHECKS, GROUPS
from ddtree_ops.model.archs import arch_table


class Row(NamedTuple):
    """One check; ``applies``: to which services."""

    id: str
    group: str
    severity: str
    what: str
    reference: str
    applies: str


def rows() -> list[Row]:
    """All checks in the order in which they are made."""
    found = [
        Row(check.id, check.group, check.severity, check.what, check.reference, "sglang" if check.gpus else "all")
        for check in sorted(CHECKS.values(), key=lambda each: GROUPS.index(each.group))
    ]
    found += [
        Row(active.id, "active", "error", active.what, active.reference, "sglang" if active.gpus else "all")
        for active in ACTIVE.values()
    ]
    return found


def checks_markdown() -> str:
    """The checks as Markdown tables, a group each."""
    lines = []
    for group in GROUPS:
        lines += [f"### {group}", "", "| check | severity | proves | reference |", "|---|---|---|---|"]
        lines += [f"| `{r.id}` | {r.severity} | {r.what} | {r.reference} |" for r in rows() if r.group == group]
        lines.append("")
    return "\n".join(lines)


def archs_markdown() -> str:
    """What is known of the archs and the rules that follow, as Markdown tables."""
    table = arch_table()
    lines = [f"Table {table.version}, for {table.made_for}.", ""]
    lines += ["| arch | GPUs | shared memory a block | Triton calls | attention | MoE |", "|---|---|---|---|---|---|"]
    for name, arch in table.archs.items():
        calls = f"`{arch.ptxas} --gpu-name={arch.gpu_name}`"
        works = f"{', '.join(arch.attention)} | {', '.join(arch.moe)}"
        lines.append(f"| {name} | {arch.gpus} | {arch.shared_memory_kib} KiB | {calls} | {works} |")
    lines += ["", "| rule | on | does | why | source |", "|---|---|---|---|---|"]
    for rule in table.rules:
        where = ", ".join(rule.when.archs or ["all"])
        changes = [*(f"{key}: {str(value).lower()}" for key, value in rule.set.items()), *rule.extra_args]
        changes += [f"env.{rule.copy_env['to']}"] if rule.copy_env else []
        does = "refuses" if rule.refuse else f"sets `{', '.join(changes)}`"
        lines.append(f"| `{rule.id}` | {where} | {does} | {rule.refuse or rule.reason} | {rule.source} |")
    return "\n".join([*lines, ""])


def document(text: str) -> str:
    """docs/doctor.md with what stands between its markers written anew."""
    for name, made in (("checks", checks_markdown()), ("archs", archs_markdown())):
        begin, end = f"<!-- {name}: python -m ddtree_ops.doctor.table docs/doctor.md -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"no place for {name}")
        text = f"{before}{begin}\n\n{made}\n{end}{after}"
    return text


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(document(file.read_text(encoding="utf-8")), encoding="utf-8")
