"""Selection ``tokens``: every server's greedy tokens at each concurrency, held against each other.

Selection ``noise``: how far a bf16 server's own tokens are from its prefill's argmax, by the gap.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .ask import JSON, Asker
from .lab import Lab, Running

NEW_TOKENS = 128
EAGER_SERIAL = 24
"""Prompts that a server without graphs is asked at C=1: it is slow, and C=8 and 32 ask all."""


@dataclass(frozen=True)
class HeldOut:
    """A prompt of the pair's held-out set with the fp32 greedy continuation that torch gave it."""

    ids: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """What one server answered at one concurrency; ``outputs`` and ``steps`` (verify steps of each request) have None
    where a request failed. ``drafts``: accepted ones, those behind the length limit included. ``cached``: requests
    whose prompt was, in part, in the server's cache."""

    outputs: list[list[int] | None]
    seconds: float
    steps: list[int | None]
    drafts: int
    troubles: list[str]
    cached: int

    @property
    def verify_steps(self) -> int:
        return sum(step for step in self.steps if step)

    @property
    def commit_length(self) -> float | None:
        """Tokens that a verify step commits, as the reference engine's measure counts them."""
        return 1 + self.drafts / self.verify_steps if self.verify_steps else None

    @property
    def tokens(self) -> int:
        return sum(len(output) for output in self.outputs if output is not None)


def held_out(pair: Path, count: int) -> list[HeldOut]:
    return [
        HeldOut(tuple(p["prompt_ids"]), tuple(p["ar_fp32"])) for p in json.loads((pair / "held_out.json").read_text())
    ][:count]


async def ask_all(
    ask: Asker,
    prompts: list[tuple[int, ...]],
    concurrency: int,
    tokens: int,
    key: str | None = None,
    order: Sequence[int] | None = None,
    sampling: Callable[[int], JSON] = lambda i: {},
) -> Round:
    """The prompts, ``concurrency`` at a time, each in its own cache namespace: a new one, or those of ``key``, where an
    earlier round left prompts and outputs. ``order``: which ones and in what order (default: all). ``sampling``: the
    parameters of the i-th (default: greedy)."""
    gate = asyncio.Semaphore(concurrency)
    outputs: list[list[int] | None] = [None] * len(prompts)
    steps: list[int | None] = [None] * len(prompts)
    drafts, cached, troubles = 0, 0, []
    key = key or fresh_key()

    async def one(i: int) -> None:
        nonlocal drafts, cached
        async with gate:
            answer = await ask.generate(prompts[i], tokens, extra_key=f"{key}-{i}", sampling=sampling(i))
        if answer.status == 200:
            outputs[i] = answer.ids
            steps[i] = answer.meta.get("spec_verify_ct") or 0
            drafts += answer.meta.get("spec_num_correct_drafts") or 0
            cached += bool(answer.meta.get("cached_tokens"))
        else:
            troubles.append(f"{answer.status} {answer.text[:120]}")

    begun = time.monotonic()
    await asyncio.gather(*(one(i) for i in order or range(len(prompts))))
    return Round(outputs, time.monotonic() - begun, steps, drafts, troubles, cached)


def in_one(held: list[HeldOut], context: int, shift: int) -> list[int]:
    """``context`` tokens of held-out text, one after another, from prompt ``shift`` on."""
    text: list[int] = []
    while len(text) < context:
        prompt = held[shift % len(held)]
        text += [*prompt.ids, *prompt.expected]
        shift += 1
    return text[:context]


def fresh_key() -> str:
    return f"round-{time.monotonic_ns()}"


def differing(one: Round, other: list[list[int] | None]) -> tuple[int, int]:
    """(outputs compared, outputs that differ)."""
    pairs = [(a, b) for a, b in zip(one.outputs, other, strict=False) if a is not None and b is not None]
    return len(pairs), sum(a != b for a, b in pairs)


async def run_tokens(lab: Lab, prompts: list[HeldOut], concurrencies: tuple[int, ...], names: tuple[str, ...]) -> None:
    rounds: dict[tuple[str, int], Round] = {}

    async def server(name: str) -> None:
        async with lab.hold(name) as (running,):
            for concurrency in concurrencies:
                some = prompts[:EAGER_SERIAL] if concurrency == 1 and not running.spec.graphs else prompts
                got = await ask_all(running.ask, [p.ids for p in some], concurrency, NEW_TOKENS)
                rounds[name, concurrency] = got
                tell(lab, "tokens", running, concurrency, got, some)

    told = await asyncio.gather(*(server(name) for name in names), return_exceptions=True)
    for name, error in zip(names, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("tokens", name, "all", False, why=repr(error))
    outputs = {f"{name}-c{c}": got.outputs for (name, c), got in rounds.items()}
    lab.results.evidence.joinpath("tokens.json").write_text(json.dumps(outputs) + "\n")
    _compare(lab, rounds)


def tell(lab: Lab, what: str, running: Running, concurrency: int, got: Round, prompts: list[HeldOut]) -> None:
    """A row of the selection ``what``: speed, accept length, and in fp32 whether all is as the torch model has it."""
    spec = running.spec
    compared, wrong = differing(got, [list(p.expected) for p in prompts])
    figures: dict[str, object] = {"tok_s": got.tokens / got.seconds, "differ_from_torch_fp32": f"{wrong}/{compared}"}
    if got.verify_steps:
        figures["accept_length"] = got.tokens / got.verify_steps
    if got.troubles:
        figures["troubles"] = f"{len(got.troubles)}: {got.troubles[0]}"
    exact = wrong == 0 and compared == len(prompts)
    ok = exact if spec.dtype == "float32" else (None if not got.troubles else False)
    lab.results.add(what, spec.name, f"C={concurrency}", ok, **figures)


def _compare(lab: Lab, rounds: dict[tuple[str, int], Round]) -> None:
    """fp32: everything equals AR at C=1. bf16: how many outputs differ from AR's. Stock equals patched at C=1."""
    for (name, concurrency), got in rounds.items():
        spec = lab.servers[name].spec
        base = rounds.get(("ar-fp32" if spec.dtype == "float32" else "ar-bf16", 1))
        if base is not None and base is not got:
            compared, wrong = differing(got, base.outputs)
            ok = (wrong == 0 and compared > 0) if spec.dtype == "float32" else None
            lab.results.add("tokens", name, f"C={concurrency} against AR C=1", ok, differ=f"{wrong}/{compared}")
        twin = rounds.get((name.removesuffix("-stock"), concurrency))
        if spec.stock and twin is not None:
            compared, wrong = differing(got, twin.outputs)
            ok = (wrong == 0 and compared > 0) if concurrency == 1 else None
            lab.results.add("tokens", name, f"C={concurrency} against patched", ok, differ=f"{wrong}/{compared}")


async def run_noise(
    lab: Lab, prompts: list[HeldOut], names: tuple[str, ...], judge: str, concurrencies: tuple[int, ...]
) -> None:
    """Each server's own tokens, scored by ``judge``'s prefill: how many are not the argmax, and by how much.

    Then the same of second turns that go on from the first ones' cache, whose KV was made token by token.
    """
    asked = [prompt.ids for prompt in prompts]
    for name in names:
        for concurrency in concurrencies:
            key = fresh_key()
            async with lab.hold(name) as (running,):
                got = await ask_all(running.ask, asked, concurrency, NEW_TOKENS, key)
                # beginnings of other prompts, so that not all turns end as they did
                turns = [
                    (*p, *(o or ()), *asked[i - 1][:8]) for i, (p, o) in enumerate(zip(asked, got.outputs, strict=True))
                ]
                second = await ask_all(running.ask, turns, concurrency, NEW_TOKENS, key)
            await _noise(lab, judge, name, f"C={concurrency}", asked, got)
            await _noise(lab, judge, name, f"C={concurrency}, second turn", turns, second)


async def _noise(lab: Lab, judge: str, name: str, case: str, prompts: list[tuple[int, ...]], got: Round) -> None:
    async with lab.hold(judge) as (judging,):
        gaps, judged, troubles = await gaps_of(judging.ask, prompts, got.outputs)
    # bf16 logits of this pair's size have steps of 1/32 to 1/8
    steps = Counter(round(gap * 32) / 32 for gap in gaps)
    lab.results.add(
        *("noise", name, f"{case}, scored by {judge}", None if not troubles + got.troubles else False),
        judged=judged,
        not_argmax=len(gaps),
        rate=len(gaps) / max(judged, 1),
        largest=max(gaps, default=0.0),
        gaps=dict(sorted(steps.items())),
        troubles=(troubles + got.troubles)[:1],
    )


async def gaps_of(
    ask: Asker, prompts: list[tuple[int, ...]], outputs: list[list[int] | None]
) -> tuple[list[float], int, list[str]]:
    """(by how much each token that is not the prefill's best falls behind it, tokens judged, troubles)."""
    gate = asyncio.Semaphore(8)
    gaps: list[float] = []
    judged, troubles = 0, []

    async def one(i: int, output: list[int]) -> None:
        nonlocal judged
        async with gate:
            answer = await ask.score(
                [*prompts[i], *output], len(prompts[i]) - 1, extra_key=f"noise-{time.monotonic_ns()}"
            )
        if answer.status != 200:
            troubles.append(f"{answer.status} {answer.text[:120]}")
            return
        entries = answer.meta["input_token_logprobs"][1:]
        tops = answer.meta["input_top_logprobs"][1:]
        for (logprob, token, *_), top in zip(entries, tops, strict=True):
            judged += 1
            if top[0][1] != token and top[0][0] > logprob:
                gaps.append(top[0][0] - logprob)

    await asyncio.gather(*(one(i, output) for i, output in enumerate(outputs) if output))
    return gaps, judged, troubles
