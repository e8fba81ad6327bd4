"""Rules about GPU archs as data (``arch_rules.yaml``): what a profile may not ask of a host, and what follows for it.

Pure. Change rules are applied when a profile is resolved and recorded in it; refusals are asked for by whoever would
put it on a host, so that looking at a host is never refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ddtree_ops.model.rules import Values, change
from ddtree_ops.model.types import AppliedRule, Deployment, Host, Origin

#: Requests that SGLang 0.5.17 runs at once under speculation when nobody says how many (speculative_hook.py:257).
SPECULATIVE_REQUESTS = 48


class Arch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU arch. ``ptxas`` is the program Triton calls for ``gpu_name``; a wheel needs code for one of ``code``."""

    gpus: str
    compute_capability: str
    shared_memory_kib: int
    ptxas: str
    gpu_name: str
    code: list[str]
    attention: list[str]
    moe: list[str]


class ArchWhen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions; all that are given must hold. ``arguments``: one of these is among extra_args, ``--flag=value``."""

    archs: list[str] | None = None
    algorithms: list[str] | None = None
    attention: list[str] | None = None
    arguments: list[str] | None = None
    interconnect: str | None = None
    cuda_graph: bool | None = None
    tp_above: int | None = None
    rows_above: int | None = None
    env: str | None = None


class ArchRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule: either ``refuse`` says why it cannot work, or the others change the profile for ``reason``."""

    id: str
    when: ArchWhen
    source: str
    refuse: str | None = None
    reason: str | None = None
    set: dict[str, Any] = {}
    extra_args: list[str] = []
    copy_env: dict[str, str] = {}


class ArchTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"made_for": "for"}):
    """The whole file. ``version`` grows with every change of it."""

    version: int
    made_for: str
    archs: dict[str, Arch]
    rules: list[ArchRule]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a profile cannot work on a host: the rule's name, what was asked, why, and who says so."""

    rule: str
    asked: str
    why: str
    source: str

    def __str__(self) -> str:
        return f"{self.asked}: {self.why} (arch rule {self.rule}; {self.source})"


@functools.cache
def arch_table() -> ArchTable:
    """The packaged table."""
    text = Path(__file__).with_name("arch_rules.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), ArchTable)


def base_arch(name: str) -> str:
    """An inventory's ``sm_XX`` without what the compiler may add: ``sm_90a`` is sm_90."""
    return name.rstrip("af")


def arch_of(name: str) -> Arch | None:
    """The arch of an inventory's ``sm_XX``; None for one that the table does not have."""
    return arch_table().archs.get(base_arch(name))


def verify_rows(values: Mapping[str, Any]) -> int:
    """Tokens of the largest verify batch a profile may run: nodes and root, times requests in flight."""
    width = {"none": 1, "dflash": values["block_size"], "ddtree": (values["budget"] or 0) + 1}[values["algorithm"]]
    default = 1 if values["algorithm"] == "none" else SPECULATIVE_REQUESTS
    return int(width * (values["max_running_requests"] or default))


def arguments_of(words: Sequence[str]) -> set[str]:
    """Engine arguments as ``--flag=value`` and bare ``--flag``, whichever way they are written."""
    found = set()
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        flag, _, value = word.replace("_", "-", word.partition("=")[0].count("_")).partition("=")
        if not value and index + 1 < len(words) and not words[index + 1].startswith("--"):
            value = words[index + 1]
        found |= {flag, f"{flag}={value}"}
    return found


def asked_for(wanted: Sequence[str], words: Sequence[str]) -> list[str]:
    """Which of ``wanted`` (as ``arguments_of`` writes them) are among engine arguments.

    argparse takes every unambiguous beginning of a flag, so a beginning with the same value counts.
    """
    given = {tuple(argument.partition("=")[::2]) for argument in arguments_of(words)}
    found = []
    for argument in wanted:
        flag, _, value = argument.partition("=")
        if any(value == told and len(start) > len("--") and flag.startswith(start) for start, told in given):
            found.append(argument)
    return found


def holds(when: ArchWhen, host: Host, values: Mapping[str, Any]) -> bool:
    """Whether a rule is about this profile on this host. No rule is about the reference engine, which uses no GPU."""
    return (
        values["engine"] == "sglang"
        and (when.archs is None or base_arch(host.gpus.arch) in when.archs)
        and (when.algorithms is None or values["algorithm"] in when.algorithms)
        and (when.attention is None or values["attention_backend"] in when.attention)
        and (when.arguments is None or bool(asked_for(when.arguments, values["extra_args"])))
        and when.interconnect in (None, host.gpus.interconnect)
        and when.cuda_graph in (None, values["cuda_graph"])
        and (when.tp_above is None or values["tp"] > when.tp_above)
        and (when.rows_above is None or verify_rows(values) > when.rows_above)
        and (when.env is None or bool(values["env"].get(when.env)))
    )


def apply_arch_rules(host: Host, merged: Values) -> list[AppliedRule]:
    """Change the merged values as the rules that hold say, and say what changed; a silenced rule changes nothing."""
    applied = []
    for rule in arch_table().rules:
        if rule.refuse is not None or silenced(rule.id, merged.values) or not holds(rule.when, host, merged.values):
            continue
        where = Origin(file="arch_rules.yaml", line=1, path=rule.id)
        changes: list[str] = []
        for key, value in rule.set.items():
            changes += change(merged, key, value, where)
        missing = [word for word in rule.extra_args if word not in arguments_of(merged.values["extra_args"])]
        if missing:
            changes += change(merged, "extra_args", missing, where)
        if rule.copy_env and rule.copy_env["to"] not in merged.values["env"]:
            copied = merged.values["env"][rule.copy_env["from"]]
            changes += change(merged, f"env.{rule.copy_env['to']}", copied, where)
        if changes:
            name = f"arch rule {rule.id}; {rule.source}"
            applied.append(AppliedRule(name=name, changes=changes, reason=rule.reason or ""))
    return applied


def arch_refusals(deployment: Deployment) -> list[Refusal]:
    """Why the profile cannot work on its host, a line a rule; empty when no rule says so."""
    profile, values = deployment.profile, _values(deployment)
    found = []
    for rule in arch_table().rules:
        if rule.refuse is None or silenced(rule.id, values) or not holds(rule.when, deployment.host, values):
            continue
        asked = f"attention_backend {profile.attention_backend}"
        if rule.when.arguments is not None:
            asked = ", ".join(sorted(asked_for(rule.when.arguments, profile.extra_args)))
        where = f"{asked} on {deployment.host.name} ({deployment.host.gpus.arch})"
        found.append(Refusal(rule=rule.id, asked=where, why=rule.refuse, source=rule.source))
    return found


class Silenced(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that holds and that the profile switches off."""

    rule: str
    why: str
    reason: str
    source: str

    def __str__(self) -> str:
        return f"arch rule {self.rule} is silenced ({self.reason}); it says: {self.why} ({self.source})"


def silenced_rules(deployment: Deployment) -> list[Silenced]:
    """The rules that would refuse or change the profile, did it not silence them: for whoever reads a plan."""
    values = _values(deployment)
    return [
        Silenced(
            rule=rule.id,
            why=rule.refuse or rule.reason or "",
            reason=values["checks"][rule.id].reason,
            source=rule.source,
        )
        for rule in arch_table().rules
        if silenced(rule.id, values) and holds(rule.when, deployment.host, values)
    ]


def silenced(rule: str, values: Mapping[str, Any]) -> bool:
    """Whether the profile switches a rule off, which it must give a reason for."""
    override = values["checks"].get(rule)
    return override is not None and override.severity == "off"


def _values(deployment: Deployment) -> dict[str, Any]:
    """A resolved profile as the values that rules look at."""
    profile = deployment.profile
    return {name: getattr(profile, name) for name in profile.__struct_fields__}
