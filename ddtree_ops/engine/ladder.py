"""Budgets by batch size: ``8:8,32:0`` has trees of 8 nodes from 8 running requests on and none from 32 on."""

from __future__ import annotations

import re

STEP = "[0-9]{1,6}:[0-9]{1,6}"

Rungs = tuple[tuple[int, int], ...]
"""(from how many running requests on, budget), the first from one request on."""


def parse_ladder(text: str | None, budget: int) -> Rungs:
    """The rungs below ``budget``, which holds from one request on. Raises ValueError that says what is wrong.

    The engines take the same words: patches/sglang-0.5.17/overlay, ddtree_ladder.py.
    """
    rungs = [(1, budget)]
    for step in [] if text is None else text.split(","):
        if re.fullmatch(STEP, step) is None:
            raise ValueError(f"{step!r} is not REQUESTS:BUDGET, such as 8:8")
        first, smaller = map(int, step.split(":"))
        if first <= rungs[-1][0]:
            raise ValueError(f"{first} requests do not exceed {rungs[-1][0]}")
        if smaller >= rungs[-1][1]:
            raise ValueError(f"from {first} requests on the budget must be below {rungs[-1][1]}, not {smaller}")
        rungs.append((first, smaller))
    return tuple(rungs)
