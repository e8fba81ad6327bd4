"""The load where requests join and leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.exactness import GatePlan, Kind, Prompt, run_gate
from ddtree_ops.exactness.mixed import EVERY, schedule
from tests.unit.exactness.toy import Json, Toy, ranked

Make = Callable[..., GatePlan]


@given(st.integers(1, 40), st.integers(2, 64), st.integers(2, 4096))
def test_every_prompt_is_judged_and_some_are_broken_off(prompts: int, concurrency: int, limit: int) -> None:
    turns = schedule([limit] * prompts, concurrency)
    judged = [turn for turn in turns if not turn.broken_off]
    assert {turn.prompt for turn in judged} == set(range(prompts)) and len(judged) == max(prompts, concurrency)
    assert len(turns) - len(judged) == -(-len(judged) // EVERY)
    assert all(2 <= turn.limit <= limit and 0 <= turn.prompt < prompts for turn in turns)


def test_the_prompt_that_reaches_the_contexts_end_keeps_its_limit() -> None:
    turns = [turn for turn in schedule([64] * 20 + [31], 8) if not turn.broken_off]
    assert [turn.limit for turn in turns if turn.prompt == 20] == [31]


def test_an_output_ends_at_the_contexts_limit_where_that_is_cheap(toy: Toy, plan: Make) -> None:
    toy.info["context_length"] = 300
    verdict = run_gate(plan())
    assert verdict.kind is Kind.EXACT and verdict.counts.prompts == 10
    asked = {len(r["input_ids"]) for r in toy.requests if r["kind"] == "generate"}
    assert max(asked) == 300 - 1 - 12
    assert all(
        len(r["input_ids"]) + r["sampling_params"]["max_new_tokens"] < 300
        for r in toy.requests
        if r["kind"] == "generate"
    )
    toy.requests.clear()
    toy.info["context_length"] = 131072
    run_gate(plan())
    assert max(len(r["input_ids"]) for r in toy.requests if r["kind"] == "generate") < 100


def test_the_mixed_load_shares_one_cache_namespace(toy: Toy, plan: Make) -> None:
    run_gate(plan(second_turn_tokens=0))
    keys = Counter(r["extra_key"] for r in toy.requests if r["kind"] == "generate")
    assert sorted(keys.values())[-2:] == [1, 12]


def test_requests_of_many_lengths_run_beside_some_that_are_broken_off(toy: Toy, plan: Make) -> None:
    verdict = run_gate(plan(second_turn_tokens=0))
    assert verdict.kind is Kind.EXACT
    limits = Counter(r["sampling_params"]["max_new_tokens"] for r in toy.requests if r["kind"] == "generate")
    assert {3, 6, 9, 12, 15, 18, 21, 24} <= set(limits)
    assert sum(bool(r.get("stream")) for r in toy.requests) == 2


def test_what_a_broken_off_request_leaves_behind_is_found(toy: Toy, plan: Make) -> None:
    """Given an engine that errs once a slot was given up in the middle, only the mixed load fails."""

    def choose(ids: list[int], index: int, in_flight: int) -> int:
        left = sum(bool(r.get("stream")) for r in list(toy.requests))
        return ranked(ids)[left == 1 and index == 2]

    toy.choose = choose
    verdict = run_gate(plan(second_turn_tokens=0))
    assert verdict.kind is Kind.FAIL
    found = [f for f in verdict.findings if f.method == "self-score"]
    assert found and all(f.mixed and f.concurrency == 8 and f.position == 2 for f in found)
    assert any("C=8 mixed, position 2" in line for line in verdict.lines())


def test_a_server_that_breaks_when_it_is_left_is_inconclusive(toy: Toy, plan: Make) -> None:
    def alter(kind: str, request: Json, reply: Json) -> Json | str:
        return "500" if request.get("stream") else reply

    toy.alter = alter
    verdict = run_gate(plan())
    assert verdict.kind is Kind.INCONCLUSIVE


def test_one_request_at_a_time_has_no_company(toy: Toy, plan: Make) -> None:
    verdict = run_gate(plan(concurrency=(1,)))
    assert [(run.concurrency, run.mixed) for run in verdict.runs] == [(1, False)]


def test_the_only_load_may_be_shorter_than_the_mix_that_is_held_against_it(toy: Toy, plan: Make) -> None:
    """Second turns want outputs that end with a cache page, so the steady load asks some prompts for less."""
    # an odd number: the mix then asks the last prompt for all, and the last is one of those that are cut
    prompts = [Prompt(id=f"p{i}", kind="test", text=f"{i:02} bottles of {'xyzabc'[i % 6]}") for i in range(11)]
    verdict = run_gate(plan(concurrency=(4,), max_new_tokens=60, prompts=prompts))
    asked = {r["sampling_params"]["max_new_tokens"] for r in toy.requests if r["kind"] == "generate"}
    assert 60 in asked and any(44 <= limit < 60 for limit in asked), "no output was cut: this test shows nothing"
    assert verdict.kind is Kind.EXACT, verdict.lines()
