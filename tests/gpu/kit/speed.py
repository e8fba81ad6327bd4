"""Selection ``speed``: tokens a second and time a step of servers over the padded pair (benchmarks/gpu/pad).

Selection ``traces``: a few steps of each in torch's profiler, which benchmarks/gpu/parts splits.

One server works at a time, the others are idle; their turns alternate, so that a drift of the card hits all alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from .lab import Lab, Running
from .tokens import HeldOut, ask_all, fresh_key, in_one

LOADS = ((1, 6), (8, 32), (32, 96), (64, 128))
"""(requests in flight, requests)."""
NEW_TOKENS = 256
"""A request; the small pair's known text is half of it."""
REPEATS = 3
CONTEXTS = (512, 8000)
"""Tokens before the steps that are timed and traced. The pair knows nothing of texts beyond 2,048: only times count."""
STEPS = 64
TRACED = ((CONTEXTS[0], 1), (CONTEXTS[1], 1), (CONTEXTS[0], 8), (CONTEXTS[0], 32))
TRACED_STEPS, TRACED_TOKENS = 8, 400
"""Steps in the profiler; it takes a while to start, so the requests that it looks at are longer."""


async def run_speed(lab: Lab, held: list[HeldOut], names: tuple[str, ...]) -> None:
    async with _alone(lab, names) as servers:
        for running in servers:
            await _round(running, held, 8, 16)
        for running in servers:
            for context in CONTEXTS:
                await _steps(lab, running, held, context)
        rates: dict[tuple[str, int], list[float]] = {}
        for _ in range(REPEATS):
            begun = time.monotonic()
            for concurrency, count in LOADS:
                for running in servers:
                    got = await _round(running, held, concurrency, count)
                    rates.setdefault((running.spec.name, concurrency), []).append(got["tok_s"])
                    lab.results.add("speed", running.spec.name, f"C={concurrency}", not got["troubles"], **got)
            if lab.left_s() < 1.1 * (time.monotonic() - begun):
                break
        for name, mib in lab.memory_mib().items():
            lab.results.add("speed", name, "memory after all rounds", None, mib=mib)
        for (name, concurrency), found in rates.items():
            lab.results.add(
                *("speed", name, f"C={concurrency}, median of {len(found)}", None),
                tok_s=statistics.median(found),
                spread=f"{min(found):.4g} to {max(found):.4g}",
            )


async def run_traces(lab: Lab, held: list[HeldOut], names: tuple[str, ...]) -> None:
    async with _alone(lab, names) as servers:
        for running in servers:
            for context, concurrency in TRACED:
                await _trace(lab, running, held, context, concurrency)


@contextlib.asynccontextmanager
async def _alone(lab: Lab, names: tuple[str, ...]) -> AsyncIterator[list[Running]]:
    """Those of the servers that have started, and no other experiment."""
    for name in names:
        await lab.servers[name].ready.wait()
    async with lab.hold(*(name for name in names if lab.servers[name].failure is None)) as servers:
        yield servers


async def _round(running: Running, held: list[HeldOut], concurrency: int, count: int) -> dict[str, Any]:
    """``count`` prompts, over and over the held-out ones, each in a namespace of its own; greedy, EOS ignored."""
    asked = [held[i % len(held)] for i in range(count)]
    prompts = [p.ids for p in asked]
    got = await ask_all(running.ask, prompts, concurrency, NEW_TOKENS, sampling=lambda i: {"ignore_eos": True})
    unlike = sum(
        ids is not None and ids[: len(prompt.expected)] != list(prompt.expected)
        for ids, prompt in zip(got.outputs, asked, strict=True)
    )
    figures: dict[str, Any] = {"tok_s": got.tokens / got.seconds, "troubles": got.troubles[:1]}
    figures["differ_from_small_fp32"] = f"{unlike}/{count}"
    if got.commit_length is not None:
        figures["commit_length"] = got.commit_length
    return figures


async def _steps(lab: Lab, running: Running, held: list[HeldOut], context: int) -> None:
    """Milliseconds a step at C=1: what STEPS more tokens take than one, behind a cached prompt, over their steps."""
    ids, key = in_one(held, context, 0), fresh_key()
    found: list[float] = []
    for _ in range(REPEATS + 1):
        took, steps = [], []
        for tokens in (1, STEPS + 1):
            begun = time.monotonic()
            answer = await running.ask.generate(ids, tokens, sampling={"ignore_eos": True}, extra_key=key)
            took.append(time.monotonic() - begun)
            steps.append(answer.meta.get("spec_verify_ct") or (len(answer.ids) - 1) if answer.status == 200 else 0)
        if steps[1] > steps[0]:
            found.append(1000 * (took[1] - took[0]) / (steps[1] - steps[0]))
    # the first has the prompt's prefill in it
    step = statistics.median(found[1:]) if len(found) > 1 else None
    lab.results.add("speed", running.spec.name, f"step at {context}", step is not None, ms=step)


async def _trace(lab: Lab, running: Running, held: list[HeldOut], context: int, concurrency: int) -> None:
    """A few steps in torch's profiler, for benchmarks/gpu/parts to split."""
    name = f"{running.spec.name}-{context}-c{concurrency}"
    # a machine may hand back few files, and the evidence is packed into one
    folder = Path(lab.results.evidence, "traces", name)
    folder.mkdir(parents=True)
    prompts = [in_one(held, context, 3 * i) for i in range(concurrency)]
    asked = [running.ask.generate(p, 1, extra_key=f"trace-{i}") for i, p in enumerate(prompts)]
    await asyncio.gather(*asked)
    sampling = {"ignore_eos": True}
    work = [
        asyncio.create_task(running.ask.generate(p, TRACED_TOKENS, sampling=sampling, extra_key=f"trace-{i}"))
        for i, p in enumerate(prompts)
    ]
    await asyncio.sleep(0.25)
    told = await running.ask.post(
        "/start_profile",
        {
            "output_dir": str(folder),
            "num_steps": TRACED_STEPS,
            "activities": ["CPU", "GPU"],
            "record_shapes": False,
            "with_stack": False,
        },
    )
    await asyncio.gather(*work)
    for _ in range(40):
        if any(folder.rglob("*.json.gz")):
            break
        await asyncio.sleep(0.25)
    sizes = [path.stat().st_size for path in folder.rglob("*.json.gz")]
    case = f"trace at {context}, C={concurrency}"
    lab.results.add("speed", running.spec.name, case, bool(sizes), status=told.status, bytes=sum(sizes))
