"""A host's rules applied to merged values, and a record of what they changed."""

from __future__ import annotations

import shlex
from typing import Any, Protocol

from ddtree_ops.errors import UsageError
from ddtree_ops.model.types import AppliedRule, Host, Origin, When
from ddtree_ops.model.yamlfile import position


class Values(Protocol):
    """What rules change: values, and where each was written."""

    values: dict[str, Any]
    origins: dict[str, Origin]


def holds(when: When, arch: str, values: dict[str, Any]) -> bool:
    """True when every condition given holds. A budget's bound never holds where there is no budget."""
    budget = values["budget"]
    return (
        when.arch in (None, arch)
        and when.engine in (None, values["engine"])
        and when.algorithm in (None, values["algorithm"])
        and (when.min_budget is None or (budget is not None and budget >= when.min_budget))
        and (when.max_budget is None or (budget is not None and budget <= when.max_budget))
    )


def apply_rules(host: Host, merged: Values) -> list[AppliedRule]:
    """Set what the rules that hold say. Raises UsageError when two of them disagree about one key."""
    applied: list[AppliedRule] = []
    set_by: dict[str, tuple[int, Any]] = {}
    for index, rule in enumerate(host.rules):
        if not holds(rule.when, host.gpus.arch, merged.values):
            continue
        path = f"rules[{index}]"
        where = Origin(file=rule.file, line=rule.line, path=path)
        changes: list[str] = []
        for key, value in _single_changes(rule.set):
            if key in set_by and set_by[key][1] != value:
                raise UsageError(
                    position(
                        where.file, where.line, path, f"{key} contradicts rules[{set_by[key][0]}], which holds too"
                    )
                )
            set_by[key] = (index, value)
            changes += change(merged, key, value, where)
        if changes:
            applied.append(AppliedRule(name=f"{host.name} {path}", changes=changes, reason=rule.reason))
    return applied


def _single_changes(changes: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in changes.items():
        found += [(f"env.{name}", part) for name, part in value.items()] if key == "env" else [(key, value)]
    return found


def change(merged: Values, key: str, value: Any, where: Origin) -> list[str]:
    """Set one key (``env.NAME`` for a variable, ``extra_args`` is appended to); what changed, in words."""
    merged.origins[key] = where
    if key == "extra_args":
        added = value or []
        for index in range(len(added)):
            merged.origins[f"extra_args[{len(merged.values[key]) + index}]"] = where
        merged.values[key] = merged.values[key] + added
        return [f"extra_args + {shlex.join(added)}"] if added else []
    target, name = (merged.values["env"], key[4:]) if key.startswith("env.") else (merged.values, key)
    before = target.get(name)
    if before == value:
        return []
    target[name] = value
    return [f"{key} {_word(before)} -> {_word(value)}"]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "unset" if value is None else str(value)
