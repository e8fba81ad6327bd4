"""The mixed load: requests of different lengths join and leave, and some are broken off in the middle.

What a request leaves behind (its slot, its rows in the batch, its KV) then meets requests of another age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVERY = 8
SHARES = (8, 2, 5, 3, 6, 1, 7, 4)


@dataclass(frozen=True)
class Turn:
    """One request of the mixed load. ``broken_off``: leave it once it has begun to answer; it is not judged."""

    prompt: int
    limit: int
    broken_off: bool


def schedule(limits: Sequence[int], concurrency: int) -> list[Turn]:
    """Every prompt once, in another order than the steady loads', each with an eighth to all of its ``limits``.

    A prompt whose limit is below the others' reaches the context's end, so it keeps all of it. Before every EVERY-th a
    request is broken off. More rounds of the prompts where ``concurrency`` needs them. Pure.
    """
    prompts, most, turns = len(limits), max(limits), []
    for i in range(max(prompts, concurrency)):
        prompt = (prompts - 1 - i) % prompts
        if i % EVERY == 0:
            other = (prompt + prompts // 2) % prompts
            turns.append(Turn(other, limits[other], True))
        share = SHARES[i % len(SHARES)] if limits[prompt] == most else 8
        turns.append(Turn(prompt, max(min(2, limits[prompt]), limits[prompt] * share // 8), False))
    return turns
