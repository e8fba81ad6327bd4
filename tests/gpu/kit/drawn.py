"""Selection ``sampled``: AR, chain and tree draw the same tokens from the same seeds; the gate above temperature 0.

Each prompt has parameters of its own, some are greedy, so that what is read from another row shows. In float32 a draw
whose two best lie within rounding of each other falls either way: EXCUSED outputs of a round may differ.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ddtree_ops.exactness import run_gate
from ddtree_ops.exactness.golden import Recording

from .judged import gate_prompts, golden_of, plan_of, tell_verdict
from .lab import Lab, Running
from .tokens import HeldOut, ask_all, fresh_key

NEW_TOKENS = 96
EXCUSED = 1
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.7, "min_p": 0.05},
    {"logit_bias": {"7": 1.5}},
)
ROWS: tuple[dict[str, Any], ...] = (
    *({"temperature": t, **filters} for t in (0.3, 0.7, 1.0) for filters in FILTERS),
    {"temperature": 0.0},
)
Drawn = dict[str, dict[int, list[list[int] | None]]]
"""server -> concurrency -> outputs"""
METHODS = ("self-score", "same-seed")
GATES = 3


async def run_sampled(lab: Lab, held: list[HeldOut], names: tuple[str, ...], concurrencies: tuple[int, ...]) -> None:
    """``names``: of float32 and bfloat16 servers, those with planted faults among them; ``ar-fp32`` is the truth."""
    exact = [n for n in names if lab.servers[n].spec.dtype == "float32" and not lab.servers[n].spec.faults]
    drawn: Drawn = {}

    async def server(name: str) -> None:
        async with lab.hold(name) as (running,):
            drawn[name] = {c: await seeded_round(lab, running, held, c) for c in concurrencies}
            await unseeded(lab, running, held)
            if running.spec.algorithm == "ddtree" and lab.trees is not None:
                await plain_beside_trees(lab, running, held, drawn[name][max(concurrencies)])

    await _all(lab, exact, [server(name) for name in exact])
    lab.results.evidence.joinpath("sampled.json").write_text(json.dumps(drawn) + "\n")
    compare_draws(lab, drawn, "ar-fp32", min(concurrencies))
    await _gates(lab, held, names)


def compare_draws(lab: Lab, drawn: Drawn, truth: str, concurrency: int) -> None:
    """Every round's outputs beside those of the server ``truth`` at this concurrency."""
    wanted = drawn.get(truth, {}).get(concurrency, [])
    for name, rounds in drawn.items():
        for own, outputs in rounds.items():
            pairs = [(a, b) for a, b in zip(outputs, wanted, strict=False) if a is not None and b is not None]
            differ = sum(a != b for a, b in pairs)
            lab.results.add(
                *("sampled", name, f"C={own} against AR C={concurrency}"),
                len(pairs) == len(outputs) and differ <= EXCUSED,
                differ=f"{differ}/{len(pairs)}",
            )


async def seeded_round(lab: Lab, running: Running, held: list[HeldOut], concurrency: int) -> list[list[int] | None]:
    prompts = [p.ids for p in held]
    got = await ask_all(running.ask, prompts, concurrency, NEW_TOKENS, sampling=lambda i: _given(lab, i))
    figures: dict[str, object] = {"tok_s": got.tokens / got.seconds}
    if got.commit_length is not None:
        figures["commit_length"] = got.commit_length
    if got.troubles:
        figures["troubles"] = f"{len(got.troubles)}: {got.troubles[0]}"
    lab.results.add("sampled", running.spec.name, f"C={concurrency}", None if not got.troubles else False, **figures)
    return got.outputs


def _given(lab: Lab, i: int) -> dict[str, Any]:
    given = {**ROWS[i % len(ROWS)], "sampling_seed": 1000 + i}
    if lab.trees is None:
        # the reference engine has none
        given.pop("logit_bias", None)
    return given


async def unseeded(lab: Lab, running: Running, held: list[HeldOut]) -> None:
    """Without a seed, two draws at temperature 1 are two texts; one with a seed stays its own beside them."""
    ids, key = held[0].ids, fresh_key()
    free = [running.ask.generate(ids, 32, temperature=1.0, extra_key=f"{key}-{i}") for i in range(6)]
    seeded = [
        running.ask.generate(ids, 32, sampling={"temperature": 1.0, "sampling_seed": 5}, extra_key=f"{key}-s{i}")
        for i in range(3)
    ]
    answers = await asyncio.gather(*free, *seeded)
    texts = [tuple(answer.ids) if answer.status == 200 else () for answer in answers]
    different, same = len(set(texts[:6])), len(set(texts[6:]))
    ok = different >= 5 and same == 1 and () not in texts
    lab.results.add("sampled", running.spec.name, "without seeds", ok, texts=f"{different} of 6", seeded=f"{same} of 3")


async def plain_beside_trees(lab: Lab, running: Running, held: list[HeldOut], usual: list[list[int] | None]) -> None:
    """Budget 0 beside trees: the same tokens, and no draft accepted."""
    key = fresh_key()

    async def one(i: int) -> tuple[list[int] | None, int]:
        more = {"custom_params": {"ddtree_budget": 0}} if i % 2 else {}
        answer = await running.ask.generate(
            held[i].ids, NEW_TOKENS, sampling={**_given(lab, i), **more}, extra_key=f"{key}-{i}"
        )
        if answer.status != 200:
            return None, 0
        return answer.ids, (answer.meta.get("spec_num_correct_drafts") or 0) if i % 2 else 0

    some = range(min(24, len(held)))
    told = await asyncio.gather(*(one(i) for i in some))
    differ = sum(ids != usual[i] for i, (ids, _) in zip(some, told, strict=True))
    drafts = sum(count for _, count in told)
    lab.results.add(
        *("sampled", running.spec.name, "budget 0 beside trees", differ <= EXCUSED and drafts == 0),
        differ=f"{differ}/{len(told)}",
        drafts_of_plain=drafts,
    )


async def _gates(lab: Lab, held: list[HeldOut], names: tuple[str, ...]) -> None:
    """Same-seed in float32 against AR's golden, the distribution test in bfloat16; a planted fault must FAIL both its
    server's."""
    prompts, recording = gate_prompts(held), Recording()
    async with lab.hold("ar-fp32") as (ar,):
        await asyncio.to_thread(run_gate, plan_of(ar, prompts, ("self-score",), None), None, recording)
    golden = golden_of(recording, {})
    few = asyncio.Semaphore(GATES)

    async def one(name: str) -> None:
        spec = lab.servers[name].spec
        methods = METHODS if spec.dtype == "float32" else ("self-score", "distribution")
        async with lab.hold(name) as (running,), few:
            given = plan_of(running, prompts, methods, golden if "same-seed" in methods else None)
            verdict = await asyncio.to_thread(run_gate, given)
        tell_verdict(lab, name, methods[-1], verdict, "sampled", caught=bool(spec.faults))

    asked = [name for name in names if name != "ar-fp32"]
    await _all(lab, asked, [one(name) for name in asked])


async def _all(lab: Lab, names: list[str], work: list[Any]) -> None:
    told = await asyncio.gather(*work, return_exceptions=True)
    for name, error in zip(names, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("sampled", name, "all", False, why=repr(error))
