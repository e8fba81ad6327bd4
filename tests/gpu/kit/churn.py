"""Selection ``churn``: requests that join, leave, are aborted and retracted, and second turns through the cache.

Selection ``refusals``: what DDTREE answers with 400, by name. Every answer that is given must be AR's, and afterwards
the KV pool must be whole: SGLang checks it when idle and ends the server where slots are missing.
"""

from __future__ import annotations

import asyncio
import random
import re

from .ask import JSON
from .lab import Lab, Running
from .tokens import NEW_TOKENS, HeldOut, ask_all, differing, fresh_key

TIMES = 3
"""Requests that come and go for each prompt."""
REFUSED: dict[str, tuple[JSON, JSON]] = {
    "frequency_penalty": ({}, {"frequency_penalty": 0.5}),
    "presence_penalty": ({}, {"presence_penalty": 0.5}),
    "repetition_penalty": ({}, {"repetition_penalty": 1.2}),
    "min_new_tokens": ({}, {"min_new_tokens": 2}),
    "ddtree_budget other than 0": ({}, {"custom_params": {"ddtree_budget": 2}}),
    "regex": ({}, {"regex": "a+"}),
    "return_hidden_states": ({"return_hidden_states": True}, {}),
}
"""What the refusal must name -> (body, sampling parameters)."""


async def run_churn(lab: Lab, prompts: list[HeldOut], names: tuple[str, ...], reference: str) -> None:
    second, wanted = await _second_turns(lab, prompts, reference)

    async def server(name: str) -> None:
        async with lab.hold(name) as (running,):
            await _turns(lab, running, prompts, second, wanted)
            await _churn(lab, running, prompts)
            await _whole(lab, running)

    told = await asyncio.gather(*(server(name) for name in names), return_exceptions=True)
    for name, error in zip(names, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("churn", name, "all", False, why=repr(error))


async def _second_turns(
    lab: Lab, prompts: list[HeldOut], reference: str
) -> tuple[list[tuple[int, ...]], list[list[int] | None]]:
    """Each prompt with its answer and a beginning of another, so that not all go on as they did; AR's answers to it."""
    turns = [(*p.ids, *p.expected, *prompts[i - 1].ids[:8]) for i, p in enumerate(prompts)]
    async with lab.hold(reference) as (ar,):
        return turns, (await ask_all(ar.ask, turns, 16, NEW_TOKENS)).outputs


async def _turns(
    lab: Lab,
    running: Running,
    prompts: list[HeldOut],
    second: list[tuple[int, ...]],
    wanted: list[list[int] | None],
) -> None:
    """The second turn reads the KV that the first one's verifies left in the cache."""
    key = fresh_key()
    first = await ask_all(running.ask, [p.ids for p in prompts], 32, NEW_TOKENS, key)
    compared, wrong = differing(first, [list(p.expected) for p in prompts])
    ok = wrong == 0 and compared == len(prompts)
    lab.results.add("churn", running.spec.name, "first turn, C=32", ok, differ=f"{wrong}/{compared}")
    for concurrency in (8, 1):
        # The last ones first: a pool that is too small for all has only those.
        order = range(len(second) if concurrency > 1 else 8)[::-1]
        got = await ask_all(running.ask, second, concurrency, NEW_TOKENS, key, order)
        compared, wrong = differing(got, wanted)
        ok = wrong == 0 and compared == len(order) and got.cached > 0
        case = f"second turn through the cache, C={concurrency}"
        lab.results.add("churn", running.spec.name, case, ok, differ=f"{wrong}/{compared}", cached=got.cached)


async def _churn(lab: Lab, running: Running, prompts: list[HeldOut]) -> None:
    """Requests of many lengths come and go; some are broken off. Whoever got an answer got AR's."""
    chosen = random.Random(5)
    gate = asyncio.Semaphore(40)
    wrong: list[str] = []
    answered = broken = 0

    async def one(i: int) -> None:
        nonlocal answered, broken
        prompt, tokens = prompts[i % len(prompts)], chosen.choice([1, 2, 5, 17, 40, 90, 128])
        await asyncio.sleep(chosen.random() * 6)
        async with gate:
            asking = asyncio.create_task(running.ask.generate(prompt.ids, tokens, extra_key=f"churn-{i % 7}"))
            if i % 6 == 0:
                await asyncio.sleep(chosen.random() * 0.3)
                if asking.cancel():
                    broken += 1
            try:
                answer = await asking
            except asyncio.CancelledError:
                return
        answered += 1
        if answer.status != 200 or answer.ids != list(prompt.expected[:tokens]):
            wrong.append(f"{i}: {answer.status} {answer.text[:80]}")

    requests = TIMES * len(prompts)
    await asyncio.gather(*(one(i) for i in range(requests)))
    log = running.log.read_text(errors="replace")
    retracted = len(re.findall(r"[Rr]etract", log))
    ok = not wrong and answered + broken >= requests
    # a small pool is there to be too small
    ok = ok and (retracted > 0 or "small" not in running.spec.name or lab.trees is None)
    figures = {"answered": answered, "broken_off": broken, "log_retracts": retracted, "wrong": wrong[:2]}
    lab.results.add("churn", running.spec.name, f"{requests} requests", ok, **figures)


async def _whole(lab: Lab, running: Running) -> None:
    """Nothing runs: the cache can be flushed, the server's own idle check is content, and all slots are free."""
    flushed = 0
    for _ in range(40):
        flushed = (await running.ask.post("/flush_cache", {})).status
        if flushed == 200:
            break
        await asyncio.sleep(0.25)
    await asyncio.sleep(2.0)
    alive = await running.ask.alive()
    usage = re.findall(
        r"^sglang:(num_used_tokens|token_usage)\S* ([\d.e+-]+)$",
        (await running.ask.get("/metrics")).text,
        re.MULTILINE,
    )
    log = running.log.read_text(errors="replace")
    leaks = len(re.findall(r"memory leak|pool .*leak|kv_canary violation|violations=[1-9]", log, re.IGNORECASE))
    ok = flushed == 200 and alive and not leaks
    lab.results.add("churn", running.spec.name, "pool whole", ok, flush=flushed, leaks=leaks, told=dict(usage))


async def run_refusals(lab: Lab, names: tuple[str, ...]) -> None:
    good = [300, 301, 302]
    for name in names:
        async with lab.hold(name) as (running,):
            before = await running.ask.generate(good, 16)
            for case, (body, sampling) in REFUSED.items():
                params = {"temperature": 0, "max_new_tokens": 4, **sampling}
                answer = await running.ask.post("/generate", {"input_ids": good, **body, "sampling_params": params})
                # SGLang itself refuses hidden states, in other words, where it was not started for them
                refused = answer.status == 400 and case.replace("_", " ") in answer.text.replace("_", " ")
                # the reference engine serves some of them
                ok = refused and await running.ask.alive() if lab.trees is not None else None
                lab.results.add("refusals", name, case, ok, status=answer.status, said=answer.text[:120])
            after = await running.ask.generate(good, 16)
            ok = before.status == after.status == 200 and before.ids == after.ids
            lab.results.add("refusals", name, "same tokens as before", ok)
