"""Goldens, baselines and stops over real HTTP against the toy server, and golden files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness import GatePlan, Kind, Verdict, golden, run_gate, stops
from ddtree_ops.exactness.plan import Tree
from tests.unit.exactness import toy as toy_server
from tests.unit.exactness.conftest import PROMPTS
from tests.unit.exactness.toy import Toy, ranked

Make = Callable[..., GatePlan]
IDENTITY = golden.Identity(
    model={"config_sha256": "ab"},
    dtype="float32",
    arch="x86_64",
    tp=1,
    engine_base="reference",
    prompts=golden.prompts_version("own", PROMPTS),
    max_new_tokens=24,
)
TREE = Tree(block_size=8, budget=8, topk=4)


def codes(verdict: Verdict, effect: str) -> set[str]:
    return {reason.code for reason in verdict.reasons if reason.effect == effect}


@pytest.fixture
def recorded(toy: Toy, plan: Make) -> golden.Golden:
    """What the healthy toy answers, with the verify counts of its tree."""
    recording = golden.Recording()
    assert run_gate(plan(), recording=recording).kind is Kind.EXACT
    counts = {TREE.shape: recording.verify_counts}
    return golden.Golden(format=golden.FORMAT, identity=IDENTITY, prompts=recording.prompts, verify_counts=counts)


@pytest.fixture
def other() -> Iterator[Toy]:
    server = Toy()
    server.info["speculative_algorithm"] = None
    yield server
    server.close()


def against(plan: Make, recorded: golden.Golden, **changes: Any) -> Verdict:
    return run_gate(plan(methods=("golden",), golden=recorded, tree=TREE, second_turn_tokens=0, **changes))


def test_the_same_tokens_and_verify_counts_are_exact(plan: Make, recorded: golden.Golden) -> None:
    verdict = against(plan, recorded)
    assert verdict.kind is Kind.EXACT
    assert verdict.runs[0].judged == verdict.runs[0].generated and verdict.counts.verify_counts == 10


def test_what_verify_and_prefill_have_wrong_in_common_is_found_by_the_golden_only(
    plan: Make, recorded: golden.Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_server, "ranked", lambda ids: ranked(ids)[::-1] if sum(ids) % 9 == 0 else ranked(ids))
    assert run_gate(plan(second_turn_tokens=0)).kind is Kind.EXACT
    verdict = against(plan, recorded)
    assert verdict.kind is Kind.FAIL
    assert any(f.gap == pytest.approx(0.7) for f in verdict.findings if f.method == "golden")


def test_a_wrong_token_fails_against_the_golden_without_logprobs(toy: Toy, plan: Make, recorded: golden.Golden) -> None:
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 5]
    toy.alter = lambda kind, request, reply: "400" if kind == "score" else reply
    toy.tokenizes = True
    verdict = against(plan, recorded)
    assert verdict.kind is Kind.FAIL
    assert {(f.position, f.gap) for f in verdict.findings if f.method == "golden"} == {(5, None)}


def test_more_verify_steps_for_the_same_tokens_fail(toy: Toy, plan: Make, recorded: golden.Golden) -> None:
    toy.accept = 3
    verdict = against(plan, recorded)
    assert verdict.kind is Kind.FAIL and codes(verdict, "fail") == {"verify-count"}
    assert not verdict.findings


@pytest.mark.parametrize(("recorded_at", "compared_at"), [((1,), (1, 8)), ((1, 8), (1,)), ((1,), (1,))])
def test_a_golden_holds_whole_outputs_whatever_loads_recorded_it(
    toy: Toy, plan: Make, recorded_at: tuple[int, ...], compared_at: tuple[int, ...]
) -> None:
    """Given outputs that are cut to whole pages before second turns, neither the golden nor the comparison is."""
    toy.info["page_size"] = 16
    recording = golden.Recording()
    assert run_gate(plan(concurrency=recorded_at), recording=recording).kind is Kind.EXACT
    counts = {TREE.shape: recording.verify_counts}
    kept = golden.Golden(format=golden.FORMAT, identity=IDENTITY, prompts=recording.prompts, verify_counts=counts)
    verdict = run_gate(plan(methods=("golden",), golden=kept, tree=TREE, concurrency=compared_at))
    assert verdict.kind is Kind.EXACT and verdict.counts.verify_counts >= 3


def test_verify_counts_of_another_tree_are_not_compared(toy: Toy, plan: Make, recorded: golden.Golden) -> None:
    toy.accept = 3
    other_tree = run_gate(
        plan(methods=("golden",), golden=recorded, tree=Tree(block_size=8, budget=16, topk=4), second_turn_tokens=0)
    )
    assert other_tree.kind is Kind.EXACT and "no-verify-counts" in codes(other_tree, "note")


def test_prompts_that_the_golden_does_not_have_are_no_pass(plan: Make, recorded: golden.Golden) -> None:
    less = msgspec.structs.replace(recorded, prompts=dict(list(recorded.prompts.items())[1:]))
    verdict = against(plan, less)
    assert verdict.kind is Kind.INCONCLUSIVE and codes(verdict, "inconclusive") == {"golden-prompt"}
    first = recorded.prompts["p0"]
    changed = {**recorded.prompts, "p0": msgspec.structs.replace(first, prompt="0" * 16)}
    verdict = against(plan, msgspec.structs.replace(recorded, prompts=changed))
    assert verdict.kind is Kind.INCONCLUSIVE and codes(verdict, "inconclusive") == {"golden-prompt"}


def test_a_baseline_is_compared_like_a_golden(toy: Toy, other: Toy, plan: Make) -> None:
    verdict = run_gate(plan(baseline=other.url))
    assert verdict.kind is Kind.EXACT
    assert {m.judged > 100 for m in verdict.methods if m.method == "baseline"} == {True}
    toy.choose = lambda ids, index, in_flight: ranked(ids)[index == 4]
    verdict = run_gate(plan(baseline=other.url))
    assert verdict.kind is Kind.FAIL
    assert {f.position for f in verdict.findings if f.method == "baseline"} == {4}


def test_a_baseline_that_speculates_or_is_not_there_proves_nothing(other: Toy, plan: Make) -> None:
    other.info["speculative_algorithm"] = "DFLASH"
    verdict = run_gate(plan(baseline=other.url))
    assert verdict.kind is Kind.INCONCLUSIVE and "baseline-speculates" in codes(verdict, "inconclusive")
    verdict = run_gate(plan(baseline="http://127.0.0.1:1"))
    assert verdict.kind is Kind.INCONCLUSIVE and "connection" in codes(verdict, "inconclusive")


def test_a_stop_token_that_is_passed_over_fails_at_both_concurrencies(toy: Toy, plan: Make) -> None:
    toy.ignore_stops = True
    verdict = run_gate(plan())
    assert verdict.kind is Kind.FAIL
    assert {(f.method, f.concurrency) for f in verdict.findings} == {("stop", 1), ("stop", 8)}
    assert all(f.expected is None for f in verdict.findings)


def test_stops_are_chosen_in_the_middle_at_a_first_occurrence() -> None:
    outputs = [tuple((i + p) % 40 for i in range(32)) for p in range(12)]
    chosen = stops.choose([None, (1,), (1, 1, 1), *outputs])
    assert len(chosen) == stops.PROMPTS
    for stop in chosen:
        assert 2 <= len(stop.expected) <= 31 and stop.expected[-1] not in stop.expected[:-1]
    assert len({len(stop.expected) for stop in chosen}) >= 4


def test_a_golden_file_is_found_by_its_identity(tmp_path: Path, recorded: golden.Golden) -> None:
    path = golden.save(tmp_path / "goldens", recorded)
    assert path.name == f"{IDENTITY.key()}.json"
    assert golden.load(path.parent, IDENTITY) == recorded
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_foreign_stale_and_damaged_goldens_are_refused_by_name(tmp_path: Path, recorded: golden.Golden) -> None:
    with pytest.raises(UsageError, match="no golden") as caught:
        golden.load(tmp_path, IDENTITY)
    assert "--record" in caught.value.hint
    path = golden.save(tmp_path, recorded)
    wanted = msgspec.structs.replace(IDENTITY, dtype="bfloat16", prompts="own-other")
    with pytest.raises(UsageError) as caught:
        golden.load(tmp_path, wanted)
    assert path.name in caught.value.message
    assert "dtype (float32, needed is bfloat16)" in caught.value.message and "prompts (" in caught.value.message
    moved = path.rename(tmp_path / f"{wanted.key()}.json")
    with pytest.raises(UsageError, match="foreign golden: it differs in dtype") as caught:
        golden.load(tmp_path, wanted)
    assert str(moved) in caught.value.message
    for content in ("{", "[]", msgspec.json.encode(msgspec.structs.replace(recorded, format=9)).decode()):
        moved.write_text(content)
        with pytest.raises(UsageError, match=moved.name):
            golden.load(tmp_path, wanted)


def test_an_edited_prompt_set_is_another_set() -> None:
    assert golden.prompts_version("own", PROMPTS) != golden.prompts_version("own", PROMPTS[1:])
