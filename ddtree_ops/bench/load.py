"""A closed-loop load: C requests in flight until every prompt was answered once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from ddtree_ops.errors import Failed


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one (server, prompts, C) gave.

    ``tokens`` and ``steps`` are summed over all answers as the server counts them (``completion_tokens``,
    ``spec_verify_ct``; without speculation a step is a token). ``outputs`` are the token ids, in prompt order.
    """

    prompts: int
    tokens: int
    steps: int
    seconds: float
    outputs: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_step(self) -> float:
        """Mean commit length: accepted + 1 bonus; the token that the prefill gives is in no step."""
        return (self.tokens - self.prompts) / self.steps if self.steps else 1.0


def load_held_out(path: Path, *, count: int) -> list[tuple[int, ...]]:
    """Token ids of the first ``count`` prompts of a ``held_out.json`` whose greedy continuation does not loop.

    Raises Failed when the file holds fewer.
    """
    found = [tuple(row["prompt_ids"]) for row in json.loads(path.read_text()) if not row["loops"]][:count]
    if len(found) < count:
        raise Failed(f"{path} holds only {len(found)} prompts of that kind, {count} were asked for")
    return found


def measure(
    url: str, prompts: Sequence[Sequence[int]], *, concurrency: int, max_new_tokens: int, timeout_s: float = 300
) -> Cell:
    """Ask every prompt once, greedily and to full length (EOS ignored), ``concurrency`` in flight.

    Raises Failed for any answer that is not a full one: a cell with holes is no cell.
    """
    return asyncio.run(_measure(url, prompts, concurrency, max_new_tokens, timeout_s))


async def _measure(url: str, prompts: Sequence[Sequence[int]], concurrency: int, length: int, timeout_s: float) -> Cell:
    answers: list[dict[str, Any]] = [{} for _ in prompts]
    todo = iter(range(len(prompts)))

    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False) as client:

        async def worker() -> None:
            for index in todo:
                sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
                reply = await client.post(
                    "/generate", json={"input_ids": list(prompts[index]), "sampling_params": sampling}
                )
                reply.raise_for_status()
                answers[index] = reply.json()

        started = time.monotonic()
        try:
            await asyncio.gather(*(worker() for _ in range(concurrency)))
        except (httpx.HTTPError, ValueError) as error:
            raise Failed(f"{url}: the server did not answer a request: {error}") from error
        seconds = time.monotonic() - started
    meta = [answer["meta_info"] for answer in answers]
    short = [m["completion_tokens"] for m in meta if m["completion_tokens"] != length]
    if short:
        raise Failed(f"{url}: {len(short)} answers have another length than the {length} tokens asked for")
    tokens = sum(m["completion_tokens"] for m in meta)
    verified = sum(m.get("spec_verify_ct") or 0 for m in meta)
    return Cell(
        prompts=len(prompts),
        tokens=tokens,
        steps=verified or tokens - len(prompts),
        seconds=seconds,
        outputs=tuple(tuple(answer["output_ids"]) for answer in answers),
    )
