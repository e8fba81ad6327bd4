"""The whole gate over real HTTP against the toy server: healthy, faulty, and misbehaving."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness import GatePlan, Kind, Prompt, Verdict, run_gate
from tests.unit.exactness.toy import EOS, VOCAB, Json, Toy, ranked

Make = Callable[..., GatePlan]


def codes(verdict: Verdict, effect: str) -> set[str]:
    return {reason.code for reason in verdict.reasons if reason.effect == effect}


def test_a_healthy_server_is_exact_and_its_evidence_counted(toy: Toy, plan: Make) -> None:
    seen: list[tuple[str, int, int]] = []
    verdict = run_gate(plan(), lambda *step: seen.append(step))
    assert (verdict.kind, verdict.findings, verdict.exit_code()) == (Kind.EXACT, [], 0)
    assert [reason.code for reason in verdict.reasons] == ["greedy-only"]
    assert [(run.concurrency, run.mixed, run.requests) for run in verdict.runs] == [
        (1, False, 10),
        (8, False, 10),
        (8, True, 10),
    ]
    assert all(run.judged == run.generated > 80 for run in verdict.runs)
    assert verdict.counts.compared == 20
    assert verdict.counts.second_turns == verdict.counts.second_turns_cached == 10
    assert verdict.accept_length is not None and verdict.accept_length > 3
    assert verdict.shape["speculative_ddtree_budget"] == 8
    assert [done for _, done, _ in seen] == list(range(1, 87)) and {total for _, _, total in seen} == {86}


def test_every_request_but_the_second_turn_has_its_own_cache_namespace(toy: Toy, plan: Make) -> None:
    run_gate(plan())
    asked = [r for r in toy.requests if r["kind"] in ("generate", "score")]
    keys = [r["extra_key"] for r in asked]
    assert len(keys) - len(set(keys)) == 10 + 11  # second turns, and the mixed load's twelve in one namespace
    assert all(r["sampling_params"]["temperature"] == 0 for r in asked)
    assert len({len(key) for key in keys}) == 1


def test_stop_tokens_are_judged_whether_the_server_returns_them_or_not(toy: Toy, plan: Make) -> None:
    """Given outputs that end early, the stop token is one more judged token than a server returns without it."""
    toy.choose = lambda ids, index, in_flight: EOS if index == 10 else ranked(ids)[0]
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL
    assert {(f.position, f.got) for f in verdict.findings if f.severity == "fail"} == {(10, EOS)}
    toy.include_stop = False
    verdict = run_gate(plan())
    assert {(f.position, f.got) for f in verdict.findings if f.severity == "fail"} == {(10, EOS)}
    assert verdict.runs[0].judged == verdict.runs[0].generated + verdict.runs[0].requests


def test_a_wrong_token_is_found_with_its_evidence(toy: Toy, plan: Make) -> None:
    def choose(ids: list[int], index: int, in_flight: int) -> int:
        return ranked(ids)[index == 5]

    toy.choose = choose
    verdict = run_gate(plan(policy="near-tie"))
    assert verdict.kind is Kind.FAIL and verdict.exit_code() == 4
    found = verdict.findings[0]
    assert (found.method, found.concurrency, found.position) == ("self-score", 1, 5)
    assert found.gap == pytest.approx(0.7) and found.top_two_gap == pytest.approx(0.7)
    assert found.got_text == f"<{found.got}>" and found.expected_text == f"<{found.expected}>"
    assert found.before.count("<") == 5
    assert {f.prompt for f in verdict.findings} == {f"p{i}" for i in range(10)}
    assert verdict.runs[0].beyond == 10


def test_a_wrong_token_under_load_only_is_found_by_both_methods(toy: Toy, plan: Make) -> None:
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 3 and in_flight >= 2]
    toy.takes_s = 0.04  # long enough to be in flight together on a busy machine
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL
    assert {f.concurrency for f in verdict.findings} == {8}
    assert {f.method for f in verdict.findings} >= {"self-score", "concurrency"}
    assert verdict.counts.differing > 0 and verdict.runs[0].beyond == 0


def test_differences_within_epsilon_are_near_ties_and_pass_where_the_policy_says(toy: Toy, plan: Make) -> None:
    toy.gap = 0.0625
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 7 and ids[0] == ord("3")]
    verdict = run_gate(plan(dtype="bfloat16", policy="near-tie"))
    assert verdict.kind is Kind.NEAR_TIE
    assert verdict.exit_code() == 0 and verdict.exit_code("exact") == 4
    assert all(f.gap == pytest.approx(0.0625) for f in verdict.findings)
    toy.gap = 1.1
    assert run_gate(plan(dtype="bfloat16", policy="near-tie")).kind is Kind.FAIL


def test_near_ties_at_a_rate_beyond_rounding_fail(toy: Toy, plan: Make) -> None:
    toy.gap = 0.0625
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index % 4 == 1]
    verdict = run_gate(plan(dtype="bfloat16", policy="near-tie"))
    assert verdict.kind is Kind.FAIL
    assert codes(verdict, "fail") == {"near-tie-rate"}


def test_corrupt_kv_left_in_the_cache_shows_in_the_second_turn(toy: Toy, plan: Make) -> None:
    def choose(ids: list[int], index: int, in_flight: int) -> int:
        return ranked(ids)[index == 2 and toy.poisoned]

    toy.poisoned = False  # type: ignore[attr-defined]
    toy.choose = choose
    real = toy._cached

    def cached(key: str, prompt: list[int]) -> int:
        hit = real(key, prompt)
        toy.poisoned = hit > 0  # type: ignore[attr-defined]
        return hit

    toy._cached = cached  # type: ignore[method-assign]
    verdict = run_gate(plan(concurrency=(1,)))
    assert verdict.kind is Kind.FAIL
    assert {f.method for f in verdict.findings} == {"second-turn"}
    assert verdict.counts.second_turns_differing == 10
    # one for each answer that differs from the fresh one, beside those of the target's scores
    assert sum(f.position == 2 and f.severity == "fail" for f in verdict.findings) == 2 * 10


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("speculative_ddtree_budget", 7, "argument:speculative_ddtree_budget"),
        ("speculative_ddtree_budget", True, "argument:speculative_ddtree_budget"),
        ("speculative_ddtree_budget", None, "argument:speculative_ddtree_budget"),
    ],
)
def test_resolved_arguments_that_differ_fail(toy: Toy, plan: Make, key: str, value: Any, code: str) -> None:
    toy.info[key] = value
    verdict = run_gate(plan(expect={key: 8}))
    assert verdict.kind is Kind.FAIL and codes(verdict, "fail") == {code}


def test_speculation_that_never_accepts_is_silently_off(toy: Toy, plan: Make) -> None:
    toy.accept = 1
    assert codes(run_gate(plan()), "fail") == {"speculation-off"}
    toy.info["speculative_algorithm"] = None
    assert codes(run_gate(plan()), "fail") == {"speculation-off"}
    assert run_gate(plan(algorithm="none")).kind is Kind.EXACT


def test_accept_length_under_the_floor_fails(toy: Toy, plan: Make) -> None:
    assert codes(run_gate(plan(min_accept_length=5.0)), "fail") == {"accept-length"}
    assert run_gate(plan(min_accept_length=3.0)).kind is Kind.EXACT


def test_verify_steps_without_an_algorithm_fail(toy: Toy, plan: Make) -> None:
    assert codes(run_gate(plan(algorithm="none")), "fail") == {"speculation-on"}


def outputs(change: Callable[[list[int], Json], list[int]]) -> Callable[[str, Json, Json], Json]:
    def alter(kind: str, request: Json, reply: Json) -> Json:
        if kind == "generate":
            reply["output_ids"] = change(reply["output_ids"], reply["meta_info"])
        return reply

    return alter


def counted(ids: list[int], meta: Json) -> list[int]:
    meta["completion_tokens"] = len(ids)
    return ids


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda ids, meta: counted([*ids, *[9] * 30], meta), "overlong-output"),
        (
            lambda ids, meta: counted(ids[:-2], meta) if meta["finish_reason"]["type"] == "length" else ids,
            "short-output",
        ),
        (lambda ids, meta: ids[:4] if len(ids) > 8 else ids, "completion-count"),
        (lambda ids, meta: [*ids[:-1], VOCAB], "id-outside-vocabulary"),
        (lambda ids, meta: [*ids[:-1], -1], "id-outside-vocabulary"),
    ],
)
def test_outputs_no_correct_server_returns(toy: Toy, plan: Make, change: Any, code: str) -> None:
    toy.info["context_length"] = 4096
    toy.alter = outputs(change)
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL and code in codes(verdict, "fail")


def test_an_id_outside_the_vocabulary_is_never_sent_back(toy: Toy, plan: Make) -> None:
    toy.alter = outputs(lambda ids, meta: [*ids[:-1], VOCAB + 7])
    run_gate(plan())
    assert all(max(r.get("input_ids") or [0]) < VOCAB for r in toy.requests)


def test_every_second_prompt_fills_whole_pages_before_its_second_turn(toy: Toy, plan: Make) -> None:
    toy.info["page_size"] = 16
    assert run_gate(plan(mixed=False, max_new_tokens=27)).kind is Kind.EXACT
    generated = [r for r in toy.requests if r["kind"] == "generate" and "stop_token_ids" not in r["sampling_params"]]
    sizes = [len(r["input_ids"]) + r["sampling_params"]["max_new_tokens"] for r in generated[10:20]]
    assert sum(size % 16 == 0 for size in sizes) >= 5 and sum(size % 16 != 0 for size in sizes) >= 3


def test_outputs_that_are_the_same_for_every_prompt_fail(toy: Toy, plan: Make) -> None:
    """Given an engine whose prefill says the same garbage as its decode, the scores alone would call it exact."""
    toy.choose = lambda ids, index, in_flight: 43

    def alter(kind: str, request: Json, reply: Json) -> Json:
        for i, entry in enumerate(reply.get("meta_info", {}).get("input_token_logprobs", [])[1:], start=1):
            if "input_top_logprobs" in reply["meta_info"]:
                entry[0] = math.log(0.9)
                reply["meta_info"]["input_top_logprobs"][i] = [[math.log(0.9), entry[1], ""], [-9.0, 1, ""]]
        return reply

    toy.alter = alter
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL and codes(verdict, "fail") == {"degenerate"}


def test_the_same_output_of_the_same_prompt_is_no_degenerate_output(plan: Make) -> None:
    prompts = [Prompt(id=f"p{i}", kind="test", text="always this one") for i in range(9)]
    assert run_gate(plan(prompts=prompts)).kind is Kind.EXACT


def test_texts_that_are_no_unicode_can_be_stored(toy: Toy, plan: Make) -> None:
    def alter(kind: str, request: Json, reply: Json) -> Json:
        for entry in reply.get("meta_info", {}).get("input_token_logprobs", []):
            entry[2] = "\ud800"
        return reply

    toy.alter = alter
    toy.info["version"] = "\ud800"
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 5]
    verdict = run_gate(plan())
    assert verdict.findings[0].got_text == "?" and json.dumps(verdict.to_json(), ensure_ascii=False).encode()


def meta(change: Callable[[Json], None]) -> Callable[[str, Json, Json], Json]:
    def alter(kind: str, request: Json, reply: Json) -> Json:
        if kind == "score" and request.get("top_logprobs_num"):
            change(reply["meta_info"])
        reply.get("meta_info", {}).pop("output_token_logprobs", None)
        return reply

    return alter


def shift(m: Json) -> None:
    m["input_token_logprobs"] = m["input_token_logprobs"][1:]
    m["input_top_logprobs"] = m["input_top_logprobs"][1:]


def flat(m: Json) -> None:
    for entry, top in zip(m["input_token_logprobs"][1:], m["input_top_logprobs"][1:], strict=True):
        entry[0] = top[0][0] = top[1][0] = 0.0


def above(m: Json) -> None:
    m["input_token_logprobs"][1][0] = -0.01


def constant(m: Json) -> None:
    """Scores that rank nothing: every token ties with the first."""
    for entry, top in zip(m["input_token_logprobs"][1:], m["input_top_logprobs"][1:], strict=True):
        entry[0], top[:] = -1.0, [[-1.0, 198, ""], [-1.0, 199, ""]]


def wrong_id(m: Json) -> None:
    m["input_token_logprobs"][2][1] += 1


def cached(m: Json) -> None:
    m["cached_tokens"] = 5


def no_tops(m: Json) -> None:
    del m["input_top_logprobs"]


@pytest.mark.parametrize("change", [shift, flat, above, constant, wrong_id, cached, no_tops])
def test_scores_that_contradict_the_request_or_themselves_prove_nothing(toy: Toy, plan: Make, change: Any) -> None:
    toy.alter = meta(change)
    assert run_gate(plan()).kind is Kind.INCONCLUSIVE


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_a_logprob_that_is_not_finite_fails(toy: Toy, plan: Make, value: float | None) -> None:
    def change(m: Json) -> None:
        if len(m["input_token_logprobs"]) > 3:
            m["input_token_logprobs"][3][0] = value

    toy.alter = meta(change)
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL
    assert verdict.findings[0].gap is None
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_an_aborted_output_is_inconclusive(toy: Toy, plan: Make) -> None:
    def alter(kind: str, request: Json, reply: Json) -> Json:
        if kind == "generate":
            reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory"}
        return reply

    toy.alter = alter
    assert run_gate(plan()).kind is Kind.INCONCLUSIVE


def test_too_few_tokens_are_no_evidence(plan: Make) -> None:
    verdict = run_gate(plan(concurrency=(1,), prompts=[Prompt(id="p", kind="test", text="abc")]))
    assert verdict.kind is Kind.INCONCLUSIVE and codes(verdict, "inconclusive") == {"too-little"}


def test_few_prompts_are_repeated_to_reach_the_concurrency(toy: Toy, plan: Make) -> None:
    verdict = run_gate(plan(prompts=[Prompt(id="p", kind="test", text="some words")], concurrency=(8,)))
    assert verdict.runs[0].requests == 8
    # seven more of the same prompt at C=8, eight in the mixed load
    assert verdict.counts.compared == 7 + 8 and verdict.kind is Kind.EXACT


def test_a_server_without_tokenizer_gets_stand_in_ids_and_the_verdict_says_so(toy: Toy, plan: Make) -> None:
    toy.info["skip_tokenizer_init"] = True
    verdict = run_gate(plan())
    assert verdict.kind is Kind.EXACT
    assert "pseudo-random ids" in verdict.prompt_set and codes(verdict, "note") == {"no-tokenizer", "greedy-only"}
    assert all("text" not in r for r in toy.requests)
    del toy.info["vocab_size"]
    assert "no-vocabulary" in codes(run_gate(plan()), "inconclusive")


def test_prompt_ids_outside_the_vocabulary_never_reach_the_server(toy: Toy, plan: Make) -> None:
    verdict = run_gate(plan(prompts=[Prompt(id="p", kind="own", input_ids=(5, VOCAB))]))
    assert verdict.kind is Kind.INCONCLUSIVE and "prompt-id" in codes(verdict, "inconclusive")
    assert all(VOCAB not in r.get("input_ids", []) for r in toy.requests)


def test_an_unused_cache_is_noted(toy: Toy, plan: Make) -> None:
    toy.cache_hits = False
    verdict = run_gate(plan())
    assert verdict.kind is Kind.EXACT and codes(verdict, "note") == {"cache-unused", "greedy-only"}


def test_the_api_key_goes_into_the_header_and_nowhere_else(toy: Toy, plan: Make) -> None:
    made = plan(api_key="k-123456", expect={"api_key": "k-123456"})
    toy.info["api_key"] = "other-secret"
    verdict = run_gate(made)
    assert all(r["headers"]["Authorization"] == "Bearer k-123456" for r in toy.requests)
    assert not any(secret in json.dumps(verdict.to_json()) for secret in ("k-123456", "other-secret"))


def test_many_prompts_go_through_in_groups(toy: Toy, plan: Make) -> None:
    prompts = [Prompt(id=f"q{i}", kind="test", text=f"prompt number {i}") for i in range(70)]
    verdict = run_gate(plan(prompts=prompts, max_new_tokens=8, second_turn_tokens=0))
    assert verdict.kind is Kind.EXACT and verdict.counts.prompts == 70
    steady = [run.requests for run in verdict.runs if not run.mixed]
    assert steady == [70, 72]  # the last group of six is filled up to eight in flight


@pytest.mark.parametrize(
    "change",
    [
        {"url": "ftp://x"},
        {"url": "http://h:notaport"},
        {"dtype": "int8"},
        {"concurrency": ()},
        {"concurrency": (0,)},
        {"concurrency": (1, 1)},
        {"max_new_tokens": 1},
        {"time_limit_s": 0},
        {"prompts": []},
        {"prompts": [Prompt(id="a", kind="x", text="")]},
        {"prompts": [Prompt(id="a", kind="x")]},
        {"prompts": [Prompt(id="a", kind="x", text="b"), Prompt(id="a", kind="x", text="c")]},
        {"algorithm": "eagle"},
        {"policy": "lenient"},
        {"api_key": "a\nb"},
    ],
)
def test_a_plan_that_cannot_give_a_verdict_is_refused(plan: Make, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        run_gate(plan(**change))


def test_the_stored_json_is_read_back_and_others_refused(plan: Make) -> None:
    verdict = run_gate(plan())
    stored = verdict.to_json()
    assert Verdict.from_json(stored) == verdict
    assert list(stored)[:3] == ["format", "kind", "policy"]
    assert Verdict.from_json(json.dumps(stored | {"added_later": 1})) == verdict
    for text in ("", "{}", json.dumps(stored | {"kind": "FINE"}), json.dumps(stored | {"format": 2})):
        with pytest.raises(ValueError):
            Verdict.from_json(text)
