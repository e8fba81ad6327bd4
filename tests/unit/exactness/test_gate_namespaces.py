from __future__ import annotations

from collections.abc import Callable

from ddtree_ops.exactness import GatePlan, Kind, run_gate
from tests.unit.exactness.toy import Json, Toy

Make = Callable[..., GatePlan]


def test_cache_namespaces_that_are_one_fail(toy: Toy, plan: Make) -> None:
    toy.one_namespace = True
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL and [r.code for r in verdict.reasons if r.effect == "fail"] == ["namespaces"]


def test_one_cached_answer_under_a_new_namespace_is_no_proof(toy: Toy, plan: Make) -> None:
    seen: list[str] = []

    def retracted(kind: str, request: Json, reply: Json) -> Json:
        seen.append(kind)
        if kind == "namespaces" and seen.count(kind) == 2:
            reply["meta_info"]["cached_tokens"] = 32
        return reply

    toy.alter = retracted
    assert run_gate(plan()).kind is Kind.EXACT and seen.count("namespaces") == 3
