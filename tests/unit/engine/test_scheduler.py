"""The step loop: queueing, stops inside a path, aborts, and what a crash does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ddtree_ops.engine.loading import build_decoder, resolve
from ddtree_ops.engine.metrics import Metrics
from ddtree_ops.engine.request import LogprobOptions, Request, Update
from ddtree_ops.engine.scheduler import Scheduler

from .conftest import MODES, arguments, prompts
from .pairs import Plain

COUNT = 30


class Loop:
    """A scheduler with a way to wait for its requests."""

    def __init__(self, pair: Path, mode: str, **extra: object) -> None:
        a = arguments(pair, mode, **extra)
        resolved = resolve(a)
        self.decoder = build_decoder(a, resolved)
        self.metrics = Metrics("m", resolved.draft.block_size - 1 if resolved.draft else 0)
        self.crashes: list[str] = []
        self.scheduler = Scheduler(
            self.decoder, resolved.width, a.max_running_requests, self.metrics, self.crashes.append
        )
        self.free = self.decoder.table.free
        self.updates: dict[str, list[Update]] = {}
        self.changed = threading.Condition()

    def request(self, rid: str, prompt: list[int], count: int = COUNT, **extra: object) -> Request:
        def sink(update: Update) -> None:
            with self.changed:
                self.updates[rid].append(update)
                self.changed.notify_all()

        self.updates[rid] = []
        given: dict[str, object] = {"stop_token_ids": frozenset(), "logprobs": None, "stream": False} | extra
        return Request(rid, prompt, count, sink=sink, **given)  # type: ignore[arg-type]

    def wait(self, *rids: str) -> list[Update]:
        """The last updates of requests, once they have ended."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: all(self.updates[rid] and self.updates[rid][-1].finish for rid in rids), timeout=30
            )
            return [self.updates[rid][-1] for rid in rids]

    def value(self, name: str) -> float:
        found = self.metrics.registry.get_sample_value(name, {"model_name": "m"})
        assert found is not None
        return found


@pytest.mark.parametrize("mode", MODES)
def test_more_requests_than_places_all_get_their_tokens(pair: Path, plain: Plain, mode: str) -> None:
    loop = Loop(pair, mode, max_running_requests=3)
    batch = prompts(7, seed=8)
    loop.scheduler.submit([loop.request(str(i), prompt, 8 + i) for i, prompt in enumerate(batch)])
    loop.scheduler.start()
    for i, update in enumerate(loop.wait(*map(str, range(7)))):
        assert update.output_ids == plain.greedy(batch[i], 8 + i)
        assert update.finish == {"type": "length", "length": 8 + i}
    loop.scheduler.stop("done")
    loop.scheduler.join(5)
    assert loop.scheduler.load() == (0, 0, loop.free)
    assert loop.value("sglang:generation_tokens_total") == sum(range(8, 15))
    assert loop.value("sglang:prompt_tokens_total") == sum(map(len, batch))
    assert loop.value("sglang:time_to_first_token_seconds_count") == 7
    if mode == "AR":
        assert loop.value("sglang:spec_verify_calls_total") == 0
    else:
        assert loop.value("sglang:spec_verify_calls_total") == loop.metrics.verified > 0
        assert 1 <= loop.metrics.average_commit_length <= 5
        rate, length = loop.value("sglang:spec_accept_rate"), loop.value("sglang:spec_accept_length")
        assert rate == pytest.approx((length - 1) / 4)


@pytest.mark.parametrize("mode", ["AR", "60/12"])
def test_a_stop_token_cuts_wherever_in_a_path_it_falls(pair: Path, plain: Plain, mode: str) -> None:
    loop = Loop(pair, mode)
    cases: dict[str, list[int]] = {}
    for n, prompt in enumerate(prompts(8, seed=4)):
        whole = plain.greedy(prompt, COUNT)
        for stop in set(whole):
            rid = f"{n}:{stop}"
            cases[rid] = whole[: whole.index(stop) + 1]
            options = LogprobOptions(0, 2)
            stops = frozenset({stop})
            loop.scheduler.submit(
                [loop.request(rid, prompt, stop_token_ids=stops, logprobs=options, stream=n % 2 == 1)]
            )
    loop.scheduler.start()
    inside = 0
    for rid, last in zip(cases, loop.wait(*cases), strict=True):
        parts, expected = loop.updates[rid], cases[rid]
        assert [token for update in parts for token in update.output_ids] == expected
        assert [token for update in parts for _, token in update.output_logprobs] == expected
        assert sum(len(update.output_top) for update in parts) == len(expected)
        assert last.finish == {"type": "stop", "matched": expected[-1]}
        inside += last.committed > len(expected) - 1
    # Otherwise no stop fell before the end of a path and nothing was cut.
    assert inside >= 5 or mode == "AR"
    loop.scheduler.stop("done")


def test_streamed_updates_add_up_and_output_logprobs_are_the_targets(pair: Path, plain: Plain) -> None:
    prompt = prompts(1, seed=6)[0]
    loop = Loop(pair, "8/4")
    loop.scheduler.submit([loop.request("a", prompt, stream=True, logprobs=LogprobOptions(len(prompt) - 1, 1))])
    loop.scheduler.start()
    loop.wait("a")
    parts = loop.updates["a"]
    output = [token for update in parts for token in update.output_ids]
    assert output == plain.greedy(prompt, COUNT)
    assert len(parts) == parts[-1].verify_count + 1
    expected = plain.target(prompt + output).log_softmax(dim=-1)[len(prompt) - 1 :]
    found = [logprob for update in parts for logprob, _ in update.output_logprobs]
    assert found == pytest.approx([float(expected[i, token]) for i, token in enumerate(output)], abs=2e-4)
    assert [top for update in parts for top in update.output_top] == [
        [pair] for pair in zip(found, output, strict=True)
    ]


def test_scoring_only_generates_nothing(pair: Path) -> None:
    loop = Loop(pair, "8/4")
    loop.scheduler.submit([loop.request("a", [4, 5, 6], 0, logprobs=LogprobOptions(0, 0))])
    loop.scheduler.start()
    (update,) = loop.wait("a")
    assert update.output_ids == [] and update.finish == {"type": "length", "length": 0}
    assert [token for _, token in update.input_logprobs] == [4, 5, 6]
    assert loop.decoder.executed is None


def test_requests_are_aborted_where_they_are_and_their_slots_are_free(pair: Path) -> None:
    loop = Loop(pair, "8/4", max_running_requests=1)
    loop.scheduler.submit([loop.request(rid, [4, 5], 80, stream=True) for rid in ("runs", "waits", "last")])
    loop.scheduler.abort("waits", "why not")
    loop.scheduler.abort("unknown")
    loop.scheduler.start()
    (waiting,) = loop.wait("waits")
    assert waiting.finish == {"type": "abort", "message": "why not"} and waiting.output_ids == []
    loop.scheduler.abort("runs")
    loop.wait("runs", "last")
    assert loop.updates["last"][-1].finish == {"type": "length", "length": 80}
    loop.scheduler.submit([loop.request("x", [4], 80), loop.request("y", [4], 80)])
    loop.scheduler.abort_all("all")
    assert {str(u.finish and u.finish["type"]) for u in loop.wait("x", "y")} <= {"abort", "length"}
    assert loop.scheduler.load() == (0, 0, loop.free)


def test_a_rid_in_flight_is_refused_and_may_be_used_again_later(pair: Path) -> None:
    loop = Loop(pair, "AR")
    loop.scheduler.submit([loop.request("a", [4], 3)])
    with pytest.raises(KeyError, match="a"):
        loop.scheduler.submit([loop.request("b", [4], 3), loop.request("a", [4], 3)])
    with pytest.raises(KeyError, match="c"):
        loop.scheduler.submit([loop.request("c", [4], 3), loop.request("c", [4], 3)])
    loop.updates["a"] = []
    loop.scheduler.start()
    loop.wait("a")
    loop.scheduler.submit([loop.request("a", [4], 3), loop.request("b", [4], 3)])
    loop.wait("a", "b")


def test_the_head_of_the_queue_waits_for_slots_and_nobody_overtakes_it(pair: Path) -> None:
    loop = Loop(pair, "AR", max_total_tokens=60)
    ended: list[str] = []
    loop.scheduler.submit([loop.request("a", [4], 40), loop.request("big", [4], 50), loop.request("small", [4], 2)])
    loop.scheduler.start()
    with loop.changed:
        while len(ended) < 3:
            for rid, updates in loop.updates.items():
                if updates and rid not in ended:
                    ended.append(rid)
            if len(ended) < 3:
                assert loop.changed.wait(timeout=30)
    assert ended[0] == "a"
    assert set(ended[1:]) == {"big", "small"}


def test_stopping_aborts_everything_and_refuses_more(pair: Path) -> None:
    loop = Loop(pair, "AR", max_running_requests=1)
    loop.scheduler.submit([loop.request(rid, [4], 90) for rid in ("a", "b")])
    loop.scheduler.stop("going down")
    with pytest.raises(RuntimeError, match="going down"):
        loop.scheduler.submit([loop.request("c", [4], 1)])
    loop.scheduler.start()
    assert all(u.finish == {"type": "abort", "message": "going down"} for u in loop.wait("a", "b"))
    loop.scheduler.join(5)
    assert loop.crashes == [] and loop.scheduler.failure is None


def test_a_crash_in_a_step_fails_every_request_and_is_reported_once(pair: Path) -> None:
    loop = Loop(pair, "8/4", max_running_requests=1)
    loop.decoder.target._norm.fill_(float("nan"))
    loop.scheduler.submit([loop.request(rid, [4], 90) for rid in ("a", "b")])
    loop.scheduler.start()
    for update in loop.wait("a", "b"):
        assert update.failed and update.finish is not None and "not finite" in str(update.finish["message"])
    loop.scheduler.join(5)
    assert len(loop.crashes) == 1 and "NumericError" in loop.crashes[0]
    with pytest.raises(RuntimeError, match="not finite"):
        loop.scheduler.submit([loop.request("c", [4], 1)])
