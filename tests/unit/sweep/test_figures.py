"""Given answers whose times and counts are known, a pass has the figures that follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.sweep.figures import percentiles, repeat_of, step_ms
from ddtree_ops.sweep.load import Sample
from ddtree_ops.sweep.server import arguments, parse_gpus, says_out_of_memory, too_long, too_small
from ddtree_ops.sweep.wire import Answer, Event
from ddtree_ops.sweep.workload import CODING, ENOUGH, HELD_OUT, PromptSet, eos_ids, loops, prompt_set


def answer(
    sent: float, steps: list[int], *, every: float = 0.1, ids: list[int] | None = None, spec: bool = True
) -> Answer:
    """First token 0.05 s after ``sent``, then a chunk ``every`` s that commits as many tokens as the step says."""
    events, tokens = [Event(sent + 0.05, 1)], 1
    for number, commit in enumerate(steps, start=1):
        tokens += commit
        events.append(Event(sent + 0.05 + every * number, tokens))
    ids = list(range(100, 100 + tokens)) if ids is None else ids
    meta = {"completion_tokens": tokens, "cached_tokens": 0}
    return Answer(
        sent, events, {"output_ids": ids, "meta_info": {**meta, "spec_verify_ct": len(steps)} if spec else meta}
    )


def told(events: list[Event], steps: int, accepted: list[int] | None = None) -> Answer:
    """A request of ``steps`` verify steps, which its end alone tells."""
    meta: dict[str, Any] = {"spec_verify_ct": steps}
    meta |= {} if accepted is None else {"spec_correct_drafts_histogram": accepted}
    return Answer(0.0, events, {"output_ids": list(range(events[-1].tokens)), "meta_info": meta})


def test_one_after_the_other() -> None:
    samples = [Sample(0, answer(10.0, [4, 4, 2])), Sample(1, answer(10.35, [5, 5]))]
    found = repeat_of(samples, 1, None, closed=True)
    assert found.tokens == 22 and found.seconds == pytest.approx(0.6)
    assert found.throughput == found.overall == pytest.approx(22 / 0.6)
    assert found.accept_length == 20 / 5
    assert found.commits == {2: 1, 4: 2, 5: 2} and found.unseen_steps == 0
    assert found.step_ms == pytest.approx(100) and found.steps_per_s == pytest.approx(5 / 0.6)
    assert [length for _, length in found.accept_over_time] == [4, 4, 2, 5, 5]
    assert found.ttft_ms.p50 == pytest.approx(50)
    # twenty tokens: 10 of them at 20 ms, 8 at 25, 2 at 50
    assert (found.itl_ms.p50, found.itl_ms.p99) == (pytest.approx(20), pytest.approx(50))
    assert found.in_flight == pytest.approx(1)


def test_the_steady_window_leaves_ramp_and_tail_out() -> None:
    # two in flight, each request 1 s for 10 tokens; the last one runs alone for a second more
    times = [(0.0, 1), (0.5, 2), (1.0, 3), (1.5, 4), (2.0, 5)]
    samples = [Sample(n, answer(t - 0.05, [1] * 9, every=0.1, spec=False)) for t, n in times]
    found = repeat_of(samples, 2, None, closed=True)
    assert found.accept_length is None and found.commits == {} and found.steps_per_s is None
    assert found.step_ms == pytest.approx(100)
    assert found.throughput == pytest.approx(20, rel=0.1)
    assert found.overall < 18


def test_acceptance_counts_up_to_the_first_eos() -> None:
    good = answer(0.0, [4, 4, 1, 1, 1, 1], ids=[7] * 8 + [0] * 5)
    found = repeat_of([Sample(0, good)], 1, {0}, closed=True)
    assert found.accept_length == 4.0
    assert repeat_of([Sample(0, good)], 1, None, closed=True).accept_length == 2.0
    assert found.tokens == 13


def test_several_steps_in_one_chunk_are_no_step_of_their_own() -> None:
    """A server that told steps at a request's end alone once had its last gap divided by them all: 0.3 ms a step."""
    one = told([Event(0.1, 1), Event(0.2, 9), Event(0.3, 12)], steps=4)
    found = repeat_of([Sample(0, one)], 1, None, closed=True)
    assert (found.commits, found.unseen_steps, found.accept_length) == ({}, 4, 11 / 4)
    assert found.step_ms is None and found.accept_over_time == []
    assert found.steps_per_s == pytest.approx(4 / 0.3)


def test_the_servers_own_counts_of_commits_are_taken_where_they_are_of_every_step() -> None:
    events = [Event(0.1, 1), Event(0.2, 9), Event(0.3, 12)]
    found = repeat_of([Sample(0, told(events, 4, [0, 2, 1, 1]))], 1, None, closed=True)
    assert (found.commits, found.unseen_steps) == ({2: 2, 3: 1, 4: 1}, 0)
    assert repeat_of([Sample(0, told(events, 4, [0, 2, 1]))], 1, None, closed=True).unseen_steps == 4


def test_a_few_chunks_of_several_steps_leave_the_gap_between_chunks_a_step() -> None:
    single = [Event(0.1 * (n + 1), 1 + 2 * n) for n in range(20)]
    assert step_ms([told(single, 21)]) == pytest.approx(100)
    assert step_ms([told(single, 22)]) is None


def test_steps_up_to_eos_are_unknown_where_chunks_hold_several() -> None:
    events = [Event(0.1, 1), Event(0.2, 9), Event(0.3, 12)]
    known, unknown = told(events, 2), told(events, 4)
    for one in (known, unknown):
        one.body["output_ids"] = [7] * 9 + [0] * 3
    first, second = repeat_of([Sample(0, known), Sample(1, unknown)], 1, {0}, closed=True).rows
    assert (first.until_eos, first.steps_until_eos) == (9, 1)
    assert (second.until_eos, second.steps_until_eos, second.steps) == (9, None, 4)


def test_weighted_percentiles_are_nearest_ranks() -> None:
    found = percentiles([(1.0, 98), (5.0, 1), (9.0, 1)])
    assert (found.p50, found.p90, found.p99) == (1.0, 1.0, 5.0)


def test_a_cycle_at_the_end_is_a_loop_and_a_list_is_none() -> None:
    assert loops([1, 2, 3] * 20) and loops([9] * 40) and loops([*range(50), *([4, 5, 6, 7] * 8)])
    assert not loops(list(range(60))) and not loops([1, 2] * 4) and not loops([*([1, 2] * 20), 3])


@pytest.mark.parametrize("name", [HELD_OUT, CODING])
def test_the_packaged_sets_have_enough_distinct_prompts(name: str) -> None:
    chosen = prompt_set(name, None)  # type: ignore[arg-type]
    assert len(set(chosen.prompts)) == len(chosen.prompts) >= ENOUGH
    assert chosen.sha256 == prompt_set(name, None).sha256  # type: ignore[arg-type]


def test_eos_ids_come_from_the_models_own_files() -> None:
    assert eos_ids(b"", b'{"eos_token_id": 0}') == [0]
    assert eos_ids(b'{"eos_token_id": [5, 6]}', b'{"eos_token_id": 0}') == [5, 6]
    assert eos_ids(b"{}", b'{"text_config": {"eos_token_id": 9}}') == [9]
    assert eos_ids(b"nonsense", b'{"eos_token_id": null}') is None


def test_a_server_that_would_queue_or_leave_its_graphs_is_too_small() -> None:
    assert "would queue" in (too_small({"max_running_requests": 48}, 64) or "")
    assert "would queue" in (too_small({"internal_states": [{"max_running_requests": 8}]}, 64) or "")
    assert "eagerly" in (too_small({"cuda_graph_max_bs": 32, "disable_cuda_graph": False}, 64) or "")
    assert too_small({"cuda_graph_max_bs": 32, "disable_cuda_graph": True, "max_running_requests": 64}, 64) is None
    assert too_small({}, 64) is None
    assert "does not tell" in (too_small({"disable_cuda_graph": False}, 1) or "")


@pytest.mark.parametrize(
    ("decode", "wrong"),
    [
        ({"backend": "full", "max_bs": 40, "bs": [1, 8, 40]}, "up to a batch of 40"),
        ({"backend": "full", "max_bs": 40, "bs": None}, "up to a batch of 40"),
        ({"backend": "full", "max_bs": 64, "bs": [64, 1, 8]}, None),
        ({"backend": "full", "max_bs": None, "bs": None}, "does not tell"),
        ({"backend": "disabled", "max_bs": None, "bs": None}, None),
    ],
)
def test_graphs_are_told_by_phase_since_sglang_0_5_17(decode: dict[str, Any], wrong: str | None) -> None:
    """Its old keys are gone: a sweep once measured C=64 eagerly beside 40 in graphs, and said nothing."""
    info = {"cuda_graph_config": {"decode": decode, "prefill": {"backend": "disabled"}}, "disable_cuda_graph": False}
    said = too_small(info, 64)
    assert said is None if wrong is None else wrong in (said or "")
    assert arguments(info)["cuda_graph_config"]["decode"] == decode


def test_what_does_not_fit_into_the_context_is_refused() -> None:
    chosen = PromptSet("p", ((1,) * 60, "text of unknown length"))
    assert "context of 100" in (too_long({"context_length": 100}, chosen, 41) or "")
    assert too_long({"context_length": 100}, chosen, 40) is None and too_long({}, chosen, 4000) is None


def test_arguments_hold_no_secret_and_nothing_that_changes_by_itself() -> None:
    found = arguments({"api_key": "sk-verysecret123", "tp_size": 8, "random_seed": 5, "internal_states": [], "x": None})
    assert found == {"api_key": "<redacted>", "tp_size": 8, "x": None}


def test_nvidia_smi_is_read_and_what_it_does_not_know_is_null() -> None:
    text = "0, NVIDIA X, 1980, 2619, 41, 301.5, 1024\n1, NVIDIA X, [N/A], 2619, 40, [N/A], 900\nnonsense\n"
    first, second = parse_gpus(text, [0, 1])
    assert (first.sm_clock_mhz, first.power_w, second.sm_clock_mhz, second.power_w) == (1980, 301.5, None, None)
    assert [card.index for card in parse_gpus(text, [1])] == [1]


def test_a_log_that_ran_out_of_memory_says_so() -> None:
    assert says_out_of_memory(["torch.OutOfMemoryError: CUDA out of memory."]) and not says_out_of_memory(["fine"])
