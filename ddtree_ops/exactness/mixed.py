"""The mixed load: requests of different lengths join and leave, and some are broken off in the middle.

What a request leaves behind (its slot, its rows in the batch, its KV) then meets requests of another age.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY = 8
SHARES = (8, 2, 5, 3, 6, 1, 7, 4)


@dataclass(frozen=True)
class Turn:
    """One request of the mixed load. ``broken_off``: leave it once it has begun to answer; it is not judged."""

    prompt: int
    limit: int
    broken_off: bool


def schedule(prompts: int, concurrency: int, max_new_tokens: int) -> list[Turn]:
    """Every prompt once, in another order than the steady loads', each with an eighth to all of ``max_new_tokens``.

    Before every EVERY-th a request is broken off. More rounds of the prompts where ``concurrency`` needs them. Pure.
    """
    turns = []
    for i in range(max(prompts, concurrency)):
        prompt = (prompts - 1 - i) % prompts
        if i % EVERY == 0:
            turns.append(Turn((prompt + prompts // 2) % prompts, max_new_tokens, True))
        turns.append(Turn(prompt, max(2, max_new_tokens * SHARES[i % len(SHARES)] // 8), False))
    return turns
