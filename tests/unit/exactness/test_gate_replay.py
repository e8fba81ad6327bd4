"""Replay over real HTTP against the toy server: the method for servers that refuse logprobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness import GatePlan, Kind, Verdict, run_gate
from tests.unit.exactness.toy import Json, Toy, ranked

Make = Callable[..., GatePlan]


def refusing(kind: str, request: Json, reply: Json) -> Json | str:
    return "400" if kind == "score" else reply


def codes(verdict: Verdict, effect: str) -> set[str]:
    return {reason.code for reason in verdict.reasons if reason.effect == effect}


def test_the_default_falls_back_to_replay_where_logprobs_are_refused_and_says_so(toy: Toy, plan: Make) -> None:
    toy.alter = refusing
    verdict = run_gate(plan())
    assert verdict.kind is Kind.EXACT and verdict.exit_code() == 0
    assert codes(verdict, "note") >= {"logprobs-refused", "no-tokenizer"}
    assert any("does not support return_logprob" in reason.message for reason in verdict.reasons)
    assert {m.method for m in verdict.methods if m.judged} == {"replay", "concurrency", "second-turn", "stop"}
    assert verdict.runs[0].judged == verdict.runs[0].generated > 100


def test_an_explicit_self_score_does_not_fall_back(toy: Toy, plan: Make) -> None:
    toy.alter = refusing
    verdict = run_gate(plan(methods=("self-score",)))
    assert verdict.kind is Kind.INCONCLUSIVE and "logprobs-refused" in codes(verdict, "inconclusive")


def test_texts_are_tokenised_by_the_server_where_it_offers_that(toy: Toy, plan: Make) -> None:
    toy.alter, toy.tokenizes = refusing, True
    verdict = run_gate(plan())
    assert verdict.kind is Kind.EXACT and "no-tokenizer" not in codes(verdict, "note")
    prompts = {tuple(r["input_ids"]) for r in toy.requests if r["kind"] == "generate"}
    assert tuple(ord(c) % 200 for c in "3 bottles of a") in prompts


def test_each_replay_has_its_own_namespace_asks_one_token_and_is_asked_once(toy: Toy, plan: Make) -> None:
    run_gate(plan(methods=("replay",), second_turn_tokens=0))
    asked = [r for r in toy.requests if r["kind"] == "generate" and r["sampling_params"]["max_new_tokens"] == 1]
    assert len({r["extra_key"] for r in asked}) == len(asked) == len({tuple(r["input_ids"]) for r in asked})
    judged = run_gate(plan(methods=("replay",), second_turn_tokens=0)).runs[0].judged
    assert len(asked) == judged


def test_a_wrong_token_under_load_is_found_without_logprobs(toy: Toy, plan: Make) -> None:
    toy.alter = refusing
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 3]
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL and verdict.exit_code() == 4
    found = next(f for f in verdict.findings if f.method == "replay")
    assert (found.position, found.severity, found.gap) == (3, "fail", None)
    assert found.got != found.expected


def test_a_difference_is_explained_by_logprobs_where_the_server_tells_them(toy: Toy, plan: Make) -> None:
    toy.gap = 0.0625
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 7 and ids[0] == ord("3")]
    verdict = run_gate(plan(methods=("replay",), dtype="bfloat16", policy="near-tie"))
    assert verdict.kind is Kind.NEAR_TIE
    gaps = {f.concurrency: f.gap for f in verdict.findings if f.method == "replay"}
    assert set(gaps) >= {1, 8} and list(gaps.values()) == [pytest.approx(0.0625)] * len(gaps)
    toy.gap = 1.1
    assert run_gate(plan(methods=("replay",), dtype="bfloat16", policy="near-tie")).kind is Kind.FAIL


def test_without_gaps_a_half_precision_server_fails_by_rate_only(toy: Toy, plan: Make) -> None:
    toy.alter, toy.tokenizes = refusing, True
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 7 and ids[0] == ord("3")]
    verdict = run_gate(plan(dtype="bfloat16", policy="near-tie"))
    assert verdict.kind is Kind.NEAR_TIE and "no-gaps" in codes(verdict, "note")
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index in (3, 7)]
    verdict = run_gate(plan(dtype="bfloat16", policy="near-tie"))
    assert verdict.kind is Kind.FAIL and "near-tie-rate" in codes(verdict, "fail")


def test_a_server_that_breaks_under_replay_is_inconclusive(toy: Toy, plan: Make) -> None:
    def alter(kind: str, request: Json, reply: Json) -> Json | str:
        one = kind == "generate" and request["sampling_params"]["max_new_tokens"] == 1
        return "500" if one else reply

    toy.alter = alter
    verdict = run_gate(plan(methods=("replay",)))
    assert verdict.kind is Kind.INCONCLUSIVE and {"http-500", "too-little"} <= codes(verdict, "inconclusive")


def test_an_unknown_method_is_refused(plan: Make) -> None:
    with pytest.raises(UsageError, match=r"method guess; allowed: self-score, replay"):
        run_gate(plan(methods=("guess",)))
