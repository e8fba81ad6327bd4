"""Rules about the GPU's arch: those that refuse, and an arch that nothing is known of."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.doctor.check import Case, Seen, check
from ddtree_ops.model.archs import arch_refusals, arch_table

GROUP = "arch rules"


@check(
    "arch-unknown",
    GROUP,
    "warning",
    "an arch that rules are known for",
    gpus=True,
    reference="ddtree_ops/model/arch_rules.yaml",
)
def arch_unknown(case: Case) -> Iterator[Seen]:
    if case.arch is None:
        yield Seen(
            case.deployment.host.gpus.arch,
            f"one of {', '.join(arch_table().archs)}",
            "nothing is known to work or to fail there: run ddtree doctor --active, and add what you learn",
        )


@check(
    "arch-rule",
    GROUP,
    "error",
    "nothing in the profile is known to fail on this arch",
    gpus=True,
    reference="ddtree_ops/model/arch_rules.yaml",
)
def arch_rule(case: Case) -> Iterator[Seen]:
    for refusal in arch_refusals(case.deployment):
        yield Seen(
            f"{refusal.asked} (rule {refusal.rule})",
            f"not that: {refusal.why}; {refusal.source}",
            "change the profile: plan and deploy refuse it",
        )
