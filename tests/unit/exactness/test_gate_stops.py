"""Stop tokens: where an output ends, and that it ends for that."""

from __future__ import annotations

from ddtree_ops.exactness import Kind, run_gate

from .test_gate import Make, codes
from .toy import Json, Toy, ranked


def test_a_stop_token_inside_an_output_fails(toy: Toy, plan: Make) -> None:
    toy.choose = lambda ids, index, in_flight: 17 if index == 4 else ranked(ids)[0]
    verdict = run_gate(plan(stop_token_ids=(17,)))
    assert "stop-inside" in codes(verdict, "fail")


def test_an_output_that_ends_at_its_stop_token_for_another_reason_fails(toy: Toy, plan: Make) -> None:
    def alter(kind: str, request: Json, reply: Json) -> Json:
        if kind == "generate" and request["sampling_params"].get("stop_token_ids"):
            reply["meta_info"]["finish_reason"] = {"type": "length", "length": 5}
        return reply

    toy.alter = alter
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL and "stop-finish" in codes(verdict, "fail")
