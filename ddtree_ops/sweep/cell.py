"""One cell against a running server: warm-up until steady, then its repeats.

Each pass but the first begins its C requests over the time that one took in the pass before (`drive`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ddtree_ops.sweep.figures import repeat_of
from ddtree_ops.sweep.grid import Load
from ddtree_ops.sweep.load import drive
from ddtree_ops.sweep.records import Repeat
from ddtree_ops.sweep.workload import PromptSet

#: Two passes in a row this close are steady; after WARM_PASSES it is measured all the same, and said.
STEADY, WARM_PASSES, WARM_REQUESTS = 0.05, 5, 8
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Figures:
    """What a cell gave. ``steady``: two warm-up passes in a row agreed."""

    repeats: list[Repeat]
    warmup: int
    steady: bool


def measure_cell(
    url: str,
    load: Load,
    prompts: PromptSet,
    *,
    eos: Collection[int] | None,
    pass_limit_s: float,
    api_key: str | None = None,
    tell: Tell | None = None,
) -> Figures:
    """Warm up, then measure. Raises RequestFailed, Hung."""
    count = min(load.requests, max(WARM_REQUESTS, 2 * load.concurrency))

    took = 0.0

    def once(requests: int | None, what: str) -> Repeat:
        nonlocal took
        say = (lambda done, total: tell(what, done, total)) if tell else None
        samples = asyncio.run(
            drive(url, prompts, load, limit_s=pass_limit_s, requests=requests, api_key=api_key, tell=say, apart_s=took)
        )
        found = repeat_of(samples, load.concurrency, eos, closed=load.rate is None)
        took = statistics.median(row.seconds for row in found.rows)
        return found

    passes, steady, before = 0, False, 0.0
    while passes < WARM_PASSES and not steady:
        now = once(count, "warm-up").overall
        steady = abs(now - before) <= STEADY * now
        passes, before = passes + 1, now
    repeats = [once(None, f"repeat {number} of {load.repeats}") for number in range(1, load.repeats + 1)]
    return Figures(repeats, passes, steady)
