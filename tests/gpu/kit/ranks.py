"""Selection ``ranks``: servers on two cards each (TP 2), greedy and seeded, against AR on two cards and on one.

float32 sums fall otherwise on two cards than on one, so the truth of a server on two cards is AR on two cards; how many
outputs differ from AR on one card is told beside it, of AR on two cards itself as well. NCCL's all-reduce, and no fused
one: what SGLang would compile or take from NVLink multicast depends on the machine.
"""

from __future__ import annotations

import asyncio
import json

from .branching import executed, resolved
from .drawn import Drawn, compare_draws, plain_beside_trees, seeded_round, unseeded
from .lab import Lab, Running, Spec
from .tokens import NEW_TOKENS, HeldOut, Round, ask_all, differing

TRUTH, ALONE = "tp2-ar", "ar-fp32"
"""AR on two cards, and on one."""
TWINS = {"tp2-tree-8-4": "tree-8-4", "tp2-tree-16-4": "tree-16-4"}
"""A tree on two cards -> the same on one: the same drafts, so the same commit length, NEAR enough."""
NEAR = 0.01
_TWO = ("--tp-size", "2", "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
_TREE = ("--enable-metrics", *_TWO)
RANKED = (
    Spec(TRUTH, more=_TWO),
    Spec("tp2-chain", "dflash", more=_TWO),
    Spec("tp2-tree-8-4", "ddtree", budget=8, topk=4, more=_TREE),
    Spec("tp2-tree-16-4", "ddtree", budget=16, topk=4, more=_TREE),
    # the dear checks of each step on both ranks
    Spec("tp2-tree-16-4-debug", "ddtree", budget=16, topk=4, more=_TREE, debug=True),
    # the draft's gather outside a graph
    Spec("tp2-tree-8-4-eager", "ddtree", budget=8, topk=4, more=_TREE, graphs=False),
)


async def run_ranks(lab: Lab, held: list[HeldOut], names: tuple[str, ...], concurrencies: tuple[int, ...]) -> None:
    greedy: dict[tuple[str, int], Round] = {}
    drawn: Drawn = {}

    async def server(name: str) -> None:
        async with lab.hold(name) as (running,):
            if running.spec.budget is not None:
                await resolved(lab, running)
            await _cards(lab, running)
            for concurrency in concurrencies:
                got = await ask_all(running.ask, [p.ids for p in held], concurrency, NEW_TOKENS)
                greedy[name, concurrency] = got
                if running.spec.budget is not None:
                    await executed(lab, running, f"C={concurrency}, executed")
            if name in TWINS.values():
                return
            drawn[name] = {c: await seeded_round(lab, running, held, c) for c in concurrencies}
            await unseeded(lab, running, held)
            if running.spec.algorithm == "ddtree" and lab.trees is not None:
                await plain_beside_trees(lab, running, held, drawn[name][max(concurrencies)])

    told = await asyncio.gather(*(server(name) for name in names), return_exceptions=True)
    for name, error in zip(names, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("ranks", name, "all", False, why=repr(error))
    outputs = {f"{name}-c{c}": got.outputs for (name, c), got in greedy.items()}
    lab.results.evidence.joinpath("ranks.json").write_text(json.dumps({"greedy": outputs, "seeded": drawn}) + "\n")
    first = min(concurrencies)
    _compare_greedy(lab, greedy, first)
    # AR on one card is no truth for two, so it is only told
    one_card = drawn.pop(ALONE, {})
    compare_draws(lab, drawn, TRUTH, first)
    pairs = list(zip(drawn.get(TRUTH, {}).get(first, []), one_card.get(first, []), strict=False))
    differ = sum(a != b for a, b in pairs)
    lab.results.add("ranks", TRUTH, "seeded, two cards against one", None, differ=f"{differ}/{len(pairs)}")


async def _cards(lab: Lab, running: Running) -> None:
    """That the server is of as many ranks as it was started with."""
    if lab.trees is None:
        return
    wanted = 2 if "--tp-size" in running.spec.more else 1
    size = (await running.ask.get("/server_info")).body.get("tp_size")
    lab.results.add("ranks", running.spec.name, "cards", size == wanted, tp_size=size)


def _compare_greedy(lab: Lab, rounds: dict[tuple[str, int], Round], first: int) -> None:
    for (name, concurrency), got in rounds.items():
        figures: dict[str, object] = {"tok_s": got.tokens / got.seconds}
        if got.commit_length is not None:
            figures["commit_length"] = got.commit_length
        if got.troubles:
            figures["troubles"] = f"{len(got.troubles)}: {got.troubles[0]}"
        for label, other in (("from_ar_on_two", TRUTH), ("from_ar_on_one", ALONE)):
            if (other, first) in rounds:
                compared, wrong = differing(got, rounds[other, first].outputs)
                figures[label] = f"{wrong}/{compared}"
        truth = rounds.get((TRUTH if name.startswith("tp2-") else ALONE, first))
        exact = truth is not None and differing(got, truth.outputs) == (len(got.outputs), 0)
        lab.results.add("ranks", name, f"C={concurrency}, greedy", exact, **figures)
        twin = rounds.get((TWINS.get(name, ""), concurrency))
        if twin is None or got.commit_length is None or twin.commit_length is None:
            continue
        steps = sum(a != b for a, b in zip(got.steps, twin.steps, strict=True))
        near = abs(got.commit_length / twin.commit_length - 1) <= NEAR and got.commit_length > 1
        lab.results.add(
            # the reference engine does not tell how many drafts were right
            *("ranks", name, f"C={concurrency}, drafts of one card", near if lab.trees is not None else None),
            here=got.commit_length,
            one_card=twin.commit_length,
            other_verify_steps=steps,
        )
