"""docs/upstream.md: what a maintainer of SGLang needs to judge DDTREE, made from the series and the results.

python -m benchmarks.gpu.upstream        writes it
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import table as speed
from ddtree_ops.release.patchset import load_patchset
from ddtree_ops.release.udiff import split_patch

ROOT = Path(__file__).resolve().parents[2]
BASE = "sglang-0.5.17"
PATCHES, RESULTS, PAGE = ROOT / "patches" / BASE, ROOT / "results" / "gpu", ROOT / "docs" / "upstream.md"
ARGUMENTS = PATCHES / "overlay" / "sglang" / "srt" / "speculative" / "ddtree_args.py"

DESIGN = Path(__file__).with_suffix(".md")
"""The page's first part, which nothing is made from."""


def header(text: str) -> dict[str, str]:
    """Why, What, Tests, Upstream of a patch, each in one line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        word = re.match(r"(Why|What|Tests|Upstream): (.*)", line)
        if word:
            key = word[1]
            found[key] = word[2]
        elif line.strip() and found:
            found[key] += " " + line.strip()
    return found


def patches() -> Iterator[str]:
    yield "| patch | why | what | upstream |"
    yield "|---|---|---|---|"
    for patch in load_patchset(PATCHES).patches:
        said = header(split_patch(patch.data)[0].decode())
        cells = (patch.name.removesuffix(".patch"), said["Why"], said["What"], said["Upstream"])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def runs() -> Iterator[str]:
    """A line for each run: what was asked, rows right and wrong, outputs that differed where none may."""
    yield "| run | selections | rows right | wrong | float32 outputs compared | different |"
    yield "|---|---|---|---|---|---|"
    for path in sorted(RESULTS.glob("run-*.json"), key=lambda p: int(p.stem.removeprefix("run-"))):
        told = json.loads(path.read_text())
        count = Counter(row["ok"] for row in told["rows"])
        compared = [_differ(row) for row in told["rows"] if row["ok"] is not None and _exact(row["server"])]
        whole, wrong = (sum(pair[i] for pair in compared) for i in (1, 0))
        select = told["facts"]["select"].replace(",", ", ")
        yield f"| `results/gpu/{path.stem}.txt` | {select} | {count[True]} | {count[False]} | {whole:,} | {wrong} |"


def _exact(server: str) -> bool:
    """Whether its text must be AR's to the token."""
    return "bf16" not in server and "fault" not in server and not server.startswith("fast-")


def _differ(row: dict[str, Any]) -> tuple[int, int]:
    """(different, compared)"""
    found = re.fullmatch(r"(\d+)/(\d+)", str(row["figures"].get("differ", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def refused() -> Iterator[str]:
    """The names under which DDTREE refuses, from the source of the functions that do."""
    for node in ast.walk(ast.parse(ARGUMENTS.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in ("unsupported", "unsupported_runner", "path_dependent"):
            for made in ast.walk(node):
                if isinstance(made, ast.Dict):
                    yield from (_words(key) for key in made.keys if key is not None)


def _words(key: ast.expr) -> str:
    """A literal, or an f-string with N for its values."""
    if isinstance(key, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "N" for p in key.values).rstrip(",")
    assert isinstance(key, ast.Constant)
    return str(key.value)


def page() -> str:
    rows, narrow, wide = (json.loads((RESULTS / n).read_text()) for n in (speed.RATES, speed.NARROW, speed.WIDE))
    return "\n".join(
        [
            DESIGN.read_text(),
            "## The series\n",
            *patches(),
            "\n## Evidence\n",
            "One H200 each; every file begins with its command and says why what is wrong in it is. A row is one",
            "server under one load. Outputs of servers in 16 bits, and of those with planted faults, are not",
            "counted here. CPU: `tests/unit/patches/`.\n",
            *runs(),
            "\nSpeed, on a tiny pair inside matrices of an 8B model's shape (`benchmarks/gpu/pad.py`):\n",
            speed.table(rows["rows"], narrow, wide),
            "## Limits\n",
            "Refused by name, at start or with 400: " + "; ".join(f"`{name}`" for name in refused()) + ".\n",
            "What ran where, and what ran nowhere yet: `docs/sglang.md`.\n",
        ]
    )


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
