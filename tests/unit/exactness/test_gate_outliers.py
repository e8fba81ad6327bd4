"""A few tokens beyond epsilon in 16 bits: rounding's, as healthy engines show; many, or far ones, are a fault's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddtree_ops.exactness import GatePlan, Kind, run_gate
from tests.unit.exactness.toy import Json, Toy, ranked

Make = Callable[..., GatePlan]


@pytest.mark.parametrize(
    ("prompts", "gap", "dtype", "kind"),
    [
        (1, 0.4375, "bfloat16", Kind.NEAR_TIE),
        (2, 0.9, "bfloat16", Kind.NEAR_TIE),
        (3, 0.4375, "bfloat16", Kind.FAIL),
        (1, 1.1, "bfloat16", Kind.FAIL),
        (1, 0.1, "float16", Kind.NEAR_TIE),
        (1, 0.2, "float16", Kind.FAIL),
        (1, 0.4375, "float32", Kind.FAIL),
        (1, 0.00001, "float32", Kind.FAIL),
    ],
)
def test_few_and_near_is_rounding(toy: Toy, plan: Make, prompts: int, gap: float, dtype: str, kind: Kind) -> None:
    toy.gap = gap
    wrong = [ord(c) for c in "0123456789"[:prompts]]
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 7 and ids[0] in wrong]
    verdict = run_gate(plan(dtype=dtype, policy="near-tie", mixed=False, second_turn_tokens=0, epsilon_roundings=2))
    assert verdict.kind is kind
    noted = {reason.code for reason in verdict.reasons if reason.effect == "note"}
    assert ("outliers" in noted) is (kind is Kind.NEAR_TIE)
    beyond = sum(run.beyond for run in verdict.runs)
    assert (beyond == 0) is (kind is Kind.NEAR_TIE)


def test_two_logprobs_of_the_right_token_that_are_apart_are_no_outlier(toy: Toy, plan: Make) -> None:
    """Given one token whose verify gives it another logprob than the prefill, beyond the dtype's tolerance."""
    moved: list[str] = []

    def alter(kind: str, request: Json, reply: Json) -> Json:
        told = reply.get("meta_info", {}).get("output_token_logprobs")
        if kind == "generate" and told and not moved:
            told[3][0] -= 0.7
            moved.append(kind)
        return reply

    toy.alter = alter
    verdict = run_gate(plan(dtype="bfloat16", policy="near-tie", mixed=False))
    assert moved and verdict.kind is Kind.FAIL
    assert [one.method for one in verdict.findings if one.severity == "fail"] == ["verify-logprob"]
