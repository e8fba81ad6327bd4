"""Selection ``scoring``: prompt scoring on a server that speculates, against the same on AR.

Selection ``logprobs``: what a verify told of its tokens, against a prefill of the same sequence.
"""

from __future__ import annotations

import asyncio
import math
import time

from .ask import Answer
from .lab import Lab, Running
from .tokens import HeldOut, ask_all, differing

#: nats; fp32 sums in another order, bf16 hidden states rounded at other places
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.35}
STARTS = (0, 1, 40, 127, 191)


def fresh() -> str:
    return f"score-{time.monotonic_ns()}"


def told(answer: Answer) -> tuple[list[float | None], list[int], list[list[int]]]:
    """(logprobs, ids, top ids) of a scored prompt."""
    entries = answer.meta["input_token_logprobs"]
    tops = [[entry[1] for entry in top] if top else [] for top in answer.meta["input_top_logprobs"]]
    return [entry[0] for entry in entries], [entry[1] for entry in entries], tops


def largest(ours: list[float | None], theirs: list[float | None]) -> float:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return max((abs(a - b) for a, b in pairs), default=0.0)


async def run_scoring(lab: Lab, prompts: list[HeldOut], names: tuple[str, ...], reference: str) -> None:
    """Alone, then while others decode, then broken off; the last vocabulary id included."""
    whole = [[*p.ids, *p.expected] for p in prompts[:12]]
    whole[0][100] = 2047
    async with lab.hold(reference) as (ar,):
        expected = {
            (i, start): await ar.ask.score(ids, start, top=3, extra_key=fresh())
            for i, ids in enumerate(whole)
            for start in STARTS
        }
    for name in names:
        async with lab.hold(name) as (running,):
            for tokens in (0, 1):
                got = await _score_all(running, whole, tokens)
                _judge(lab, running, f"alone, max_new_tokens {tokens}", whole, got, expected)
            await _mixed(lab, running, prompts, whole, expected)
            await _broken_off(lab, running, prompts, whole)


async def _score_all(running: Running, whole: list[list[int]], tokens: int) -> dict[tuple[int, int], Answer]:
    keys = [(i, start) for i in range(len(whole)) for start in STARTS]
    asked = (running.ask.score(whole[i], start, top=3, tokens=tokens, extra_key=fresh()) for i, start in keys)
    return dict(zip(keys, await asyncio.gather(*asked), strict=True))


def _judge(
    lab: Lab,
    running: Running,
    case: str,
    whole: list[list[int]],
    got: dict[tuple[int, int], Answer],
    expected: dict[tuple[int, int], Answer],
) -> None:
    wrong: list[str] = []
    apart, tops_apart = 0.0, 0
    for (i, start), answer in got.items():
        reference = expected[i, start]
        if answer.status != 200 or reference.status != 200:
            wrong.append(f"{i}/{start}: {answer.status} {answer.text[:100]} (AR {reference.status})")
            continue
        logprobs, ids, tops = told(answer)
        ar_logprobs, ar_ids, ar_tops = told(reference)
        if ids != whole[i][start:] or ar_ids != ids:
            wrong.append(f"{i}/{start}: other ids")
        else:
            apart = max(apart, largest(logprobs, ar_logprobs))
            tops_apart += sum(a[:1] != b[:1] for a, b in zip(tops, ar_tops, strict=True))
    ok = not wrong and apart <= TOLERANCE[running.spec.dtype]
    lab.results.add(
        *("scoring", running.spec.name, case, ok),
        asked=len(got),
        largest=apart,
        other_best=tops_apart,
        wrong=f"{len(wrong)}: {wrong[0]}" if wrong else "0",
    )


async def _mixed(
    lab: Lab,
    running: Running,
    prompts: list[HeldOut],
    whole: list[list[int]],
    expected: dict[tuple[int, int], Answer],
) -> None:
    """Scoring requests join and leave a batch that decodes; neither side may notice the other."""
    others = prompts[:48]
    decoding = asyncio.create_task(ask_all(running.ask, [p.ids for p in others], 16, 128))
    scored: dict[tuple[int, int], Answer] = {}
    while not decoding.done():
        scored = await _score_all(running, whole, 1 if scored else 0)
    _judge(lab, running, "while others decode", whole, scored, expected)
    got = await decoding
    compared, wrong = differing(got, [list(p.expected) for p in others])
    ok = (wrong == 0 if running.spec.dtype == "float32" else True) and compared == len(others)
    lab.results.add("scoring", running.spec.name, "decoding while scored", ok, differ=f"{wrong}/{compared}")


async def _broken_off(lab: Lab, running: Running, prompts: list[HeldOut], whole: list[list[int]]) -> None:
    others = prompts[:16]
    decoding = asyncio.create_task(ask_all(running.ask, [p.ids for p in others], 16, 128))
    long = [token for ids in whole for token in ids][:1900]
    left = 0
    for wait in (0.001, 0.004, 0.01, 0.02, 0.05) * 6:
        asking = asyncio.create_task(running.ask.score(long, 0, top=2, extra_key=fresh()))
        await asyncio.sleep(wait)
        left += asking.cancel()
    got = await decoding
    compared, wrong = differing(got, [list(p.expected) for p in others])
    ok = (
        (wrong == 0 if running.spec.dtype == "float32" else True)
        and compared == len(others)
        and await running.ask.alive()
    )
    lab.results.add("scoring", running.spec.name, "broken off", ok, broken_off=left, differ=f"{wrong}/{compared}")


async def run_logprobs(lab: Lab, prompts: list[HeldOut], names: tuple[str, ...]) -> None:
    for name in names:
        async with lab.hold(name) as (running,):
            await _greedy(lab, running, prompts[:32])
            if running.spec.algorithm != "ddtree":
                await _sampled(lab, running, prompts[:8])


async def _greedy(lab: Lab, running: Running, prompts: list[HeldOut]) -> None:
    """Verify-time logprobs and ranks of greedy tokens, in AR's fields, against the prefill's."""
    asked = {"return_logprob": True, "top_logprobs_num": 5}
    answers = await asyncio.gather(*(running.ask.generate(p.ids, 64, extra_key=fresh(), **asked) for p in prompts))
    wrong, apart, top_apart, tokens = [], 0.0, 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.status != 200:
            wrong.append(f"{answer.status} {answer.text[:100]}")
            continue
        entries, tops = answer.meta["output_token_logprobs"], answer.meta["output_top_logprobs"]
        if [entry[1] for entry in entries] != answer.ids or len(tops) != len(entries):
            wrong.append(f"{len(entries)} logprobs, {len(tops)} ranks for {len(answer.ids)} tokens")
            continue
        score = await running.ask.score([*prompt.ids, *answer.ids], len(prompt.ids) - 1, top=5, extra_key=fresh())
        apart = max(apart, largest([entry[0] for entry in entries], told(score)[0][1:]))
        for ours, theirs in zip(tops, score.meta["input_top_logprobs"][1:], strict=True):
            prefill = {entry[1]: entry[0] for entry in theirs}
            common = [abs(entry[0] - prefill[entry[1]]) for entry in ours if entry[1] in prefill]
            top_apart = max(top_apart, max(common, default=math.inf))
        tokens += len(entries)
    ok = not wrong and max(apart, top_apart) <= TOLERANCE[running.spec.dtype]
    figures = {"tokens": tokens, "largest": apart, "largest_rank": top_apart, "wrong": wrong[:1]}
    lab.results.add("logprobs", running.spec.name, "greedy against prefill", ok, **figures)


async def _sampled(lab: Lab, running: Running, prompts: list[HeldOut]) -> None:
    """At temperature 0.7 a token's logprob is that of the scaled distribution, as under AR."""
    temperature, everything = 0.7, list(range(2048))
    wrong, apart, tokens = [], 0.0, 0
    for prompt in prompts:
        answer = await running.ask.generate(
            prompt.ids, 24, temperature=temperature, return_logprob=True, extra_key=fresh()
        )
        if answer.status != 200:
            wrong.append(f"{answer.status} {answer.text[:100]}")
            continue
        sequence, start = [*prompt.ids, *answer.ids], len(prompt.ids) - 1
        score = await running.ask.score(sequence, start, top=0, token_ids_logprob=everything, extra_key=fresh())
        if score.status != 200:
            wrong.append(f"score {score.status} {score.text[:100]}")
            continue
        rows = score.meta["input_token_ids_logprobs"][1:]
        for (logprob, token, *_), row in zip(answer.meta["output_token_logprobs"], rows, strict=True):
            scaled = [entry[0] / temperature for entry in row]
            top = max(scaled)
            total = top + math.log(sum(math.exp(value - top) for value in scaled))
            apart = max(apart, abs(logprob - (scaled[token] - total)))
            tokens += 1
    ok = not wrong and apart <= 2 * TOLERANCE[running.spec.dtype]
    lab.results.add("logprobs", running.spec.name, "temperature 0.7", ok, tokens=tokens, largest=apart, wrong=wrong[:1])
