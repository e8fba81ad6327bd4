"""Verify-time logprobs against the prefill's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddtree_ops.exactness import GatePlan, Kind, Verdict, run_gate
from tests.unit.exactness.toy import Json, Toy

Make = Callable[..., GatePlan]


def codes(verdict: Verdict, effect: str) -> set[str]:
    return {reason.code for reason in verdict.reasons if reason.effect == effect}


@pytest.mark.parametrize(
    ("dtype", "error", "kind"),
    [
        ("float32", 0.0, Kind.EXACT),
        ("float32", 1e-5, Kind.EXACT),
        ("float32", 0.002, Kind.FAIL),
        ("bfloat16", 0.3, Kind.EXACT),
        ("bfloat16", 0.7, Kind.FAIL),
    ],
)
def test_logprobs_apart_beyond_the_dtypes_tolerance_fail_though_every_token_is_right(
    toy: Toy, plan: Make, dtype: str, error: float, kind: Kind
) -> None:
    toy.logprob_error = -error
    verdict = run_gate(plan(dtype=dtype, second_turn_tokens=0))
    assert verdict.kind is kind
    assert {f.method for f in verdict.findings} == ({"verify-logprob"} if kind is Kind.FAIL else set())
    assert all(f.gap == pytest.approx(error) and f.got == f.expected for f in verdict.findings)
    assert next(m.judged for m in verdict.methods if m.method == "verify-logprob") > 60


def test_a_server_that_refuses_or_withholds_them_is_noted(toy: Toy, plan: Make) -> None:
    def asks(kind: str, request: Json) -> bool:
        return kind == "generate" and bool(request.get("return_logprob"))

    def withheld(kind: str, request: Json, reply: Json) -> Json:
        if asks(kind, request):
            del reply["meta_info"]["output_token_logprobs"]
        return reply

    alters: list[Any] = [withheld, lambda kind, request, reply: "400" if asks(kind, request) else reply]
    for alter in alters:
        toy.alter = alter
        verdict = run_gate(plan(second_turn_tokens=0))
        assert verdict.kind is Kind.EXACT and "verify-logprob" in codes(verdict, "note")


def test_logprobs_of_other_tokens_prove_nothing(toy: Toy, plan: Make) -> None:
    def alter(kind: str, request: Json, reply: Json) -> Json:
        for entry in reply.get("meta_info", {}).get("output_token_logprobs", []):
            entry[1] += 1
        return reply

    toy.alter = alter
    assert run_gate(plan(second_turn_tokens=0)).kind is Kind.INCONCLUSIVE


def test_without_speculation_there_is_no_verify(toy: Toy, plan: Make) -> None:
    toy.info["speculative_algorithm"] = None
    verdict = run_gate(plan(algorithm="none", second_turn_tokens=0))
    assert verdict.kind is Kind.EXACT
    assert not any(r.get("return_logprob") for r in toy.requests if r["kind"] == "generate")
