"""Selection ``models``: DDTREE over other kinds of target: latent attention with experts, and experts alone.

In float32 a tree's tokens are AR's. Over a model whose weights are random that says something only where a wrong mask
would have changed them: each kind has a server with the planted mask fault, and where that one's text is AR's as well
the kind does not count.

Selection ``pages``: KV in pages of several tokens. What ``churn`` asks, and prompts that end at the context's limit.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from .ask import Asker
from .churn import run_churn
from .lab import Lab, Running, Spec
from .tokens import HeldOut, Round, ask_all, differing, fresh_key, gaps_of, held_out

NEW_TOKENS = 96
LOADS, STAND_IN_LOADS = ((1, 10), (8, 40), (32, 60)), ((1, 2), (8, 6))
"""(requests in flight, prompts); where the reference engine stands in, on a CPU."""
TURNS = 24
SEEN = 0.2
"""Of the faulty server's outputs, how many must differ from AR's for the kind to count; no fault differs in none."""
SPECULATED = 1.5
"""Tokens a step, so that accepted paths are what was compared."""
HALF_RATE = 0.01
"""Of a 16-bit server's own tokens, how many may not be its prefill's best, beside twice AR's own rate."""
BEFORE_LIMIT, NOT_GIVEN = (7, 8, 9, 10, 11, 15, 17, 18, 19, 33, 40, 64, 65, 90, 130, 200), 2
"""Tokens of context left to prompts that go up to its end. SGLang refuses one that leaves less than 7 and gives two
tokens less than there is context (``get_worker_info`` in tp_worker.py)."""

_FEW_GRAPHS = ("--cuda-graph-bs-decode", "1", "4", "8", "16", "32")
_SMALL_VOCABULARY = (*_FEW_GRAPHS, "--skip-server-warmup")
"""SGLang warms up with a text, whose tokens may lie outside a vocabulary of 512."""


def _tree(name: str, kind: str | None, budget: int = 16, topk: int = 4, page: int = 1, **more: Any) -> Spec:
    few = _SMALL_VOCABULARY if kind in ("mla", "kimi") else _FEW_GRAPHS
    words = ("--enable-metrics", *few, "--page-size", str(page))
    return Spec(name, "ddtree", budget=budget, topk=topk, kind=kind, more=words, **more)


_FAULT = ("mask-rows-by-block-size", "no-canary")
_STRICT = (
    ("SGLANG_DEBUG_MEMORY_POOL", "1"),
    ("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1"),
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),
)
"""SGLang's own checks of every allocation and of every owner's pages."""

KINDS: dict[str, tuple[Spec, ...]] = {
    # AR first, the faulty one last
    "mla": (
        Spec("mla-ar", kind="mla", more=_SMALL_VOCABULARY),
        _tree("mla-16-4", "mla"),
        _tree("mla-64-4", "mla", 64),
        _tree("mla-16-4-page-64", "mla", page=64),
        _tree("mla-fault", "mla", faults=_FAULT),
    ),
    "moe": (
        Spec("moe-ar", kind="moe", more=_FEW_GRAPHS),
        _tree("moe-16-4", "moe"),
        _tree("moe-fault", "moe", faults=_FAULT),
    ),
    # latents and heads of Kimi K2's own sizes, which in float32 take minutes to compile
    "kimi": (
        Spec("kimi-ar-bf16", kind="kimi", dtype="bfloat16", more=_SMALL_VOCABULARY),
        _tree("kimi-16-4-bf16", "kimi", dtype="bfloat16"),
        _tree("kimi-fault-bf16", "kimi", dtype="bfloat16", faults=_FAULT),
    ),
}
PAGES = (
    _tree("page-4", None, 64, 8, page=4),
    _tree("page-16", None, page=16),
    _tree("page-64-chunk", None, chunk=64, page=64),
    _tree("page-16-small", None, slots=3008, page=16),
    _tree("page-16-strict", None, overlap=False, environment=_STRICT, page=16),
)
SPECS = (*(spec for specs in KINDS.values() for spec in specs), *PAGES)
NEEDS = {
    "models": tuple(spec.name for specs in KINDS.values() for spec in specs),
    "pages": ("ar-fp32", *(spec.name for spec in PAGES)),
}


async def run_models(lab: Lab) -> None:
    works = [_kind(lab, [s.name for s in specs if s.name in lab.servers]) for specs in KINDS.values()]
    for kind, error in zip(KINDS, await asyncio.gather(*works, return_exceptions=True), strict=True):
        if isinstance(error, BaseException):
            lab.results.add("models", kind, "all", False, why=repr(error))


@dataclass(frozen=True)
class Seen:
    """Of one server: a round a load; of a 16-bit one the share of the last round's tokens that are not its own
    prefill's best."""

    rounds: list[Round]
    off: float | None


async def _kind(lab: Lab, names: list[str]) -> None:
    """names: of one kind's servers, AR's first."""
    if not names:
        return
    prompts = held_out(lab.pair_of(lab.servers[names[0]].spec), _loads(lab)[-1][1])
    seen: dict[str, Seen] = {}

    async def server(name: str) -> None:
        async with lab.hold(name) as (running,):
            seen[name] = await _seen(lab, running, prompts)

    told = await asyncio.gather(*(server(name) for name in names), return_exceptions=True)
    for name, error in zip(names, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("models", name, "all", False, why=repr(error))
    kept = {name: [one.outputs for one in of.rounds] for name, of in seen.items()}
    lab.results.evidence.joinpath(f"models-{names[0]}.json").write_text(json.dumps(kept) + "\n")
    if names[0] not in seen:
        return
    for name in seen:
        _judge(lab, lab.servers[name].spec, seen[name], seen[names[0]])
    await _second_turns(lab, list(seen), prompts, seen[names[0]].rounds[-1])


def _loads(lab: Lab) -> tuple[tuple[int, int], ...]:
    return LOADS if lab.trees is not None else STAND_IN_LOADS


async def _seen(lab: Lab, running: Running, prompts: list[HeldOut]) -> Seen:
    rounds = []
    for concurrency, count in _loads(lab):
        asked = [p.ids for p in prompts[:count]]
        rounds.append(await ask_all(running.ask, asked, concurrency, NEW_TOKENS))
    if running.spec.dtype == "float32":
        return Seen(rounds, None)
    gaps, judged, troubles = await gaps_of(running.ask, asked, rounds[-1].outputs)
    figures = {"not_argmax": len(gaps), "judged": judged, "largest": max(gaps, default=0.0), "troubles": troubles[:1]}
    lab.results.add("models", running.spec.name, "scored by its own prefill", None, **figures)
    return Seen(rounds, len(gaps) / judged if judged and not troubles else 1.0)


def _judge(lab: Lab, spec: Spec, seen: Seen, of_ar: Seen) -> None:
    for (concurrency, count), got, true in zip(_loads(lab), seen.rounds, of_ar.rounds, strict=True):
        compared, wrong = differing(got, true.outputs)
        a_step = got.tokens / got.verify_steps if got.verify_steps else 1.0
        figures = {"differ": f"{wrong}/{compared}", "tokens_a_step": a_step, "troubles": got.troubles[:1]}
        exact = spec.dtype == "float32"
        if spec.algorithm == "none":
            same = differing(got, of_ar.rounds[-1].outputs)[1] == 0 and compared == count
            lab.results.add("models", spec.name, f"C={concurrency} as C=32", same if exact else None, **figures)
        elif spec.faults:
            # a server whose text is right in spite of the fault says that a right one's proves nothing
            ok = wrong >= SEEN * compared > 0 if concurrency > 1 and exact else None
            lab.results.add("models", spec.name, f"C={concurrency}, the fault shows", ok, **figures)
        else:
            right = wrong == 0 and compared == count and a_step > SPECULATED
            lab.results.add("models", spec.name, f"C={concurrency} against AR", right if exact else None, **figures)
    if seen.off is not None and of_ar.off is not None and spec.algorithm != "none":
        near = seen.off <= 2 * of_ar.off + HALF_RATE
        case = "the fault shows beside AR's noise" if spec.faults else "within AR's noise"
        lab.results.add("models", spec.name, case, near != bool(spec.faults), off=seen.off, of_ar=of_ar.off)


async def _second_turns(lab: Lab, names: list[str], prompts: list[HeldOut], truth: Round) -> None:
    """Go on from what the first turns' verifies left in the cache; AR's are computed anew."""
    first = truth.outputs[:TURNS]
    turns = [
        (*p.ids, *(o or ()), *prompts[i - 1].ids[:8]) for i, (p, o) in enumerate(zip(prompts, first, strict=False))
    ]

    async def asked(name: str, key: str | None) -> Round:
        async with lab.hold(name) as (running,):
            if key is not None:
                await ask_all(running.ask, [p.ids for p in prompts[:TURNS]], 8, NEW_TOKENS, key)
            return await ask_all(running.ask, turns, 8, NEW_TOKENS, key)

    specs = (lab.servers[name].spec for name in names)
    exact = [spec.name for spec in specs if spec.dtype == "float32" and not spec.faults]
    if not exact:
        return
    wanted = (await asked(exact[0], None)).outputs
    for name, got in zip(exact, await asyncio.gather(*(asked(n, fresh_key()) for n in exact)), strict=True):
        compared, wrong = differing(got, wanted)
        ok = wrong == 0 and compared == len(turns) and got.cached > 0
        case = "second turn through the cache, C=8"
        lab.results.add("models", name, case, ok, differ=f"{wrong}/{compared}", cached=got.cached)


async def run_pages(lab: Lab, held: list[HeldOut], names: tuple[str, ...]) -> None:
    """names: AR's server, then those with pages."""
    ar, *paged = names
    await run_churn(lab, held, tuple(paged), ar)
    texts = _up_to_the_limit(held, _context(lab))

    async def ends(name: str) -> list[End]:
        async with lab.hold(name) as (running,):
            # a pool that is too small for one such prompt beside another has them one by one
            return await _ends(running.ask, texts, 1 if "small" in name else 8)

    wanted = await ends(ar)
    for name, got in zip(paged, await asyncio.gather(*(ends(n) for n in paged), return_exceptions=True), strict=True):
        if isinstance(got, BaseException):
            lab.results.add("pages", name, "up to the limit", False, why=repr(got))
            continue
        wrong = [left for left, one, true in zip(BEFORE_LIMIT, got, wanted, strict=True) if one != true]
        # two refusals are alike too
        short = [
            left
            for left, (status, ids, _) in zip(BEFORE_LIMIT, wanted, strict=True)
            if lab.trees is not None and (status, len(ids)) != (200, left - NOT_GIVEN)
        ]
        lab.results.add("pages", name, "up to the limit", not wrong and not short, wrong=wrong, ar_short=short)


def _context(lab: Lab) -> int:
    return int(json.loads((lab.pair / "target" / "config.json").read_text())["max_position_embeddings"])


def _up_to_the_limit(held: list[HeldOut], context: int) -> list[tuple[int, ...]]:
    """Prompts that leave BEFORE_LIMIT tokens of the context, each another text."""
    whole = [token for p in held for token in (*p.ids, *p.expected)]
    while len(whole) < 2 * context:
        whole += whole
    return [tuple(whole[7 * i : 7 * i + context - left]) for i, left in enumerate(BEFORE_LIMIT)]


End = tuple[int, list[int], str | None]
"""(status, tokens, why it ended)"""


async def _ends(ask: Asker, texts: list[tuple[int, ...]], concurrency: int) -> list[End]:
    """What each prompt has, to the very end of the context."""
    gate, key = asyncio.Semaphore(concurrency), fresh_key()

    async def one(i: int) -> End:
        async with gate:
            sampling = {"ignore_eos": True}
            answer = await ask.generate(texts[i], BEFORE_LIMIT[i], sampling=sampling, extra_key=f"{key}-{i}")
        if answer.status != 200:
            return (answer.status, [], None)
        return (200, answer.ids, (answer.meta.get("finish_reason") or {}).get("type"))

    return list(await asyncio.gather(*(one(i) for i in range(len(texts)))))
