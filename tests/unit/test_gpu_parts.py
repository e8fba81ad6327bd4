"""benchmarks/gpu/parts: a step's time by part, from a trace made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.parts import parts, table

Event = dict[str, Any]


def kernel(name: str, begin: float, length: float, launch: int) -> Event:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": length, "args": {"correlation": launch}}


def graph(launch: int, begin: float, names: list[str], each: float) -> list[Event]:
    """A launch and its kernels, one after another, a microsecond between them."""
    told = [{"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1, "args": {"correlation": launch}}]
    return told + [kernel(name, begin + i * (each + 1), each, launch) for i, name in enumerate(names)]


def wait(name: str) -> Event:
    return {"cat": "cuda_runtime", "name": name, "ts": 0, "dur": 1, "args": {}}


def steps(count: int) -> list[Event]:
    """Of 10 ms each: a target's graph of four kernels, a commit outside, a draft of three of which one is the build."""
    events = [wait("cudaDeviceSynchronize"), *(wait("cudaEventSynchronize") for _ in range(count))]
    for step in range(count):
        at = 10_000.0 * step
        events += graph(2 * step + 1, at, ["nvjet_a", "_fwd_kernel", "nvjet_b", "norm"], 1000)
        events += [kernel("_move_path", at + 5000, 300, 1000 + step)]
        events += graph(2 * step + 2, at + 6000, ["nvjet_a", "nvjet_head", "sort"], 500)
    return events


def test_every_part_of_a_step_is_told() -> None:
    told = parts(steps(4))
    assert told.steps == 3
    assert (told.step, told.verify, told.attention) == pytest.approx((10.0, 4.003, 1.0))
    assert (told.draft, told.build, told.commit) == pytest.approx((1.001, 0.501, 0.3))
    assert told.idle == pytest.approx(10 - 4.003 - 1.502 - 0.3)
    assert told.waits == 1.0


def test_without_a_draft_there_is_none() -> None:
    events = [
        e for step in range(3) for e in graph(step, 5000.0 * step, ["nvjet_a", "_fwd_grouped_kernel_stage1"], 100)
    ]
    told = parts(events)
    assert told.draft is None and told.build is None and told.waits == 0


def test_the_ratio_is_to_ar_of_the_same_load() -> None:
    ar = parts([e for step in range(3) for e in graph(step, 5000.0 * step, ["nvjet_a", "nvjet_b"], 1000)])
    lines = table(
        {"fast-ar-512-c1": ar, "fast-tree-8-4-512-c1": parts(steps(3)), "fast-tree-8-4-512-c8": parts(steps(3))}
    )
    assert "2.00" in next(line for line in lines.splitlines() if line.startswith("fast-tree-8-4-512-c1 "))
    assert " - " in next(line for line in lines.splitlines() if line.startswith("fast-tree-8-4-512-c8"))


def test_a_trace_without_two_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="1 launches"):
        parts(steps(1))
