"""The load: requests kept in flight (closed loop) or sent as a Poisson process would (open loop), all streamed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.sweep.grid import Load
from ddtree_ops.sweep.wire import Answer, Client, RequestFailed
from ddtree_ops.sweep.workload import PromptSet

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Sample:
    """One answered request: ``prompt`` is its index in the set."""

    prompt: int
    answer: Answer


class Hung(Exception):
    """The time limit of a pass came first; the message says how far it was."""


def request_body(prompts: PromptSet, index: int, max_tokens: int, namespace: str) -> dict[str, Any]:
    """Greedy, to full length whatever EOS says, under a cache namespace that nobody used before."""
    prompt = prompts.prompts[index]
    what = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {**what, "sampling_params": sampling, "extra_key": namespace}


async def drive(
    url: str,
    prompts: PromptSet,
    load: Load,
    *,
    limit_s: float,
    requests: int | None = None,
    api_key: str | None = None,
    tell: Tell | None = None,
    apart_s: float = 0.0,
) -> list[Sample]:
    """One pass: ``requests`` (default the load's) prompts in order, each answered in full.

    ``apart_s``: the first C requests of a closed loop are sent evenly over so long. Requests of one length that began
    together end together, and their successors' prefills are one batch, which few real loads are.

    Raises RequestFailed for the first answer that is not a full one, Hung at the limit.
    """
    count = requests or load.requests
    client = Client(url, api_key)
    found: list[Sample] = []
    # Prompts come round again once all were asked: each round in a namespace of its own, so that no cache answers.
    names = [f"ddtree-sweep-{secrets.token_hex(8)}" for _ in range(-(-count // len(prompts.prompts)))]

    async def one(number: int) -> None:
        round_, index = divmod(number, len(prompts.prompts))
        answer = await client.generate(request_body(prompts, index, load.max_tokens, names[round_]))
        got = answer.body.get("meta_info", {}).get("completion_tokens")
        if got != load.max_tokens:
            raise RequestFailed(f"prompt {index}: {got} tokens instead of {load.max_tokens}")
        found.append(Sample(index, answer))
        if tell is not None:
            tell(len(found), count)

    try:
        async with asyncio.timeout(limit_s):
            await (_closed(one, count, load.concurrency, apart_s) if load.rate is None else _open(one, count, load))
    except TimeoutError:
        raise Hung(f"{len(found)} of {count} answers within {limit_s:.0f} s") from None
    except ExceptionGroup as group:
        raise next((one for one in group.exceptions if isinstance(one, RequestFailed)), group) from None
    finally:
        client.close()
    return found


@dataclass
class Kept:
    """What became of a load that was kept up: every answer, and of each request without one what came instead."""

    samples: list[Sample] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


async def keep(
    url: str,
    prompts: PromptSet,
    kept: Kept,
    *,
    max_tokens: int,
    concurrency: int,
    limit_s: float,
    pause_s: float,
    over: Callable[[], bool],
) -> None:
    """Keep requests in flight until ``over``, whatever becomes of them; each that was sent is waited for, ``limit_s``.

    ``pause_s`` is between an answer, or a failure, and the next request of the same ``concurrency``.

    ``kept`` is filled while it runs, for whoever looks from another thread.
    """
    client, namespace = Client(url), f"ddtree-keep-{secrets.token_hex(8)}"
    numbers = itertools.count()

    async def worker() -> None:
        while not over():
            number = next(numbers)
            index = number % len(prompts.prompts)
            try:
                async with asyncio.timeout(limit_s):
                    answer = await client.generate(request_body(prompts, index, max_tokens, f"{namespace}-{number}"))
                got = answer.body.get("meta_info", {}).get("completion_tokens")
                if got != max_tokens:
                    raise RequestFailed(f"{got} tokens instead of {max_tokens}")
                kept.samples.append(Sample(index, answer))
            except (RequestFailed, TimeoutError) as error:
                kept.failed.append(str(error) or f"no whole answer within {limit_s:g} s")
            await asyncio.sleep(pause_s)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    finally:
        client.close()


async def _closed(one: Callable[[int], Any], count: int, concurrency: int, apart_s: float) -> None:
    todo = iter(range(count))
    slots = min(concurrency, count)

    async def worker(slot: int) -> None:
        await asyncio.sleep(apart_s * slot / slots)
        for number in todo:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for slot in range(slots):
            group.create_task(worker(slot))


async def _open(one: Callable[[int], Any], count: int, load: Load) -> None:
    """Arrivals by a seeded Poisson process, whatever is still in flight."""
    assert load.rate is not None
    chance = random.Random(load.name)
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
            await asyncio.sleep(chance.expovariate(load.rate))


def outputs_hash(samples: list[Sample]) -> str:
    """Sha256 of all output ids by prompt: equal for two passes with equal tokens."""
    whole = hashlib.sha256()
    for sample in sorted(samples, key=lambda sample: sample.prompt):
        ids = sample.answer.body.get("output_ids") or []
        whole.update(f"{sample.prompt}:{ids}\n".encode())
    return whole.hexdigest()
