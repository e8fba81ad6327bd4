"""Selection ``tree``: DDTREE's tokens, commit lengths, widths and figures, against AR, chain and reference engine.

What must hold is what steps 2 to 4 of the work ask: a chain as a tree is DFLASH to the last verify step; every pair
gives AR's tokens, in eager mode and in graphs; the graphs are as wide as the tree and the draft's as the block.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from .lab import Lab, Running
from .tokens import NEW_TOKENS, HeldOut, Round, ask_all, differing, in_one, tell

REFERENCE = Path(__file__).resolve().parents[3] / "results" / "reference" / "measure-c1.txt"
"""Commit lengths of the reference engine, over the first REFERENCE_ROWS held-out prompts."""
REFERENCE_ROWS = 50
NEAR = 0.03
SERIAL = 12
"""Prompts at C=1: a dozen servers share the card, and more requests at once do the rest."""
BLOCK_SIZE = 8
LONG, LONG_PROMPTS = 1500, 16
"""Tokens of a prompt whose prefix the attention splits into many shares, and how many such; the pair ends at 2,048."""
CHAINS = {"tree-7-1": "dflash-fp32", "tree-7-1-bf16": "dflash-bf16-stock"}
"""A chain as a tree -> the chain."""
EAGER = {"tree-8-4": "tree-8-4-eager", "tree-64-8": "tree-64-8-eager"}
_CAPTURE = re.compile(r"Capture (target|draft) verify .*begin\. .*num_tokens_per_req=(\d+)")


def reference_commit_lengths(path: Path = REFERENCE) -> dict[tuple[int, int], float]:
    """(budget, topk) -> tokens a step, as the reference engine's measure printed them."""
    found = re.findall(r"^tree (\d+)/(\d+)\s+0 of \d+\s+([\d.]+)", path.read_text(), re.MULTILINE)
    return {(int(budget), int(topk)): float(length) for budget, topk, length in found}


async def run_tree(lab: Lab, prompts: list[HeldOut], names: tuple[str, ...], concurrencies: tuple[int, ...]) -> None:
    rounds: dict[tuple[str, int], Round] = {}
    shifts = range(0, 3 * (LONG_PROMPTS if lab.trees is not None else 2), 3)
    longer, of_longer = [tuple(in_one(prompts, LONG, shift)) for shift in shifts], {}

    async def server(name: str) -> None:
        async with lab.hold(name) as (running,):
            if running.spec.budget is not None:
                await resolved(lab, running)
            for concurrency in concurrencies:
                some = (
                    prompts[:SERIAL] if concurrency == 1 else prompts[:REFERENCE_ROWS] if concurrency < 32 else prompts
                )
                got = await ask_all(running.ask, [p.ids for p in some], concurrency, NEW_TOKENS)
                rounds[name, concurrency] = got
                tell(lab, "tree", running, concurrency, got, some)
                _tell_length(lab, running, got, some)
                if running.spec.budget is not None:
                    await executed(lab, running, f"C={concurrency}, executed")
            if running.spec.dtype == "float32":
                of_longer[name] = await ask_all(running.ask, longer, 8, NEW_TOKENS)

    told = await asyncio.gather(*(server(name) for name in names), return_exceptions=True)
    for name, error in zip(names, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("tree", name, "all", False, why=repr(error))
    outputs = {f"{name}-c{c}": got.outputs for (name, c), got in rounds.items()}
    lab.results.evidence.joinpath("tree-tokens.json").write_text(json.dumps(outputs) + "\n")
    _compare(lab, rounds, concurrencies)
    truth = of_longer.get("ar-fp32")
    for name, got in of_longer.items():
        if truth is not None and got is not truth:
            compared, wrong = differing(got, truth.outputs)
            ok = wrong == 0 and compared == len(longer)
            figures: dict[str, object] = {"differ": f"{wrong}/{compared}", "troubles": got.troubles[:1]}
            lab.results.add("tree", name, f"prompts of {LONG}, C=8, against AR", ok, **figures)


async def resolved(lab: Lab, running: Running) -> None:
    """What the server says it is, and how wide its graphs were captured."""
    spec = running.spec
    assert spec.budget is not None
    info = (await running.ask.get("/server_info")).body
    wanted = {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": spec.budget,
        "speculative_ddtree_topk": spec.topk,
        "speculative_num_draft_tokens": spec.budget + 1,
    }
    shown = {name: info.get(name) for name in wanted}
    lab.results.add("tree", spec.name, "resolved arguments", shown == wanted, **shown)
    log = running.log.read_text(errors="replace")
    if lab.trees is None:
        return
    lab.results.add("tree", spec.name, "canary", "DDTREE start-up canary passed" in log)
    found = _CAPTURE.findall(log)
    widths = {of: sorted({int(width) for role, width in found if role == of}) for of in ("target", "draft")}
    rungs = [] if spec.ladder is None else [int(rung.partition(":")[2]) for rung in spec.ladder.split(",")]
    expected = {"target": sorted(budget + 1 for budget in (spec.budget, *rungs)), "draft": [BLOCK_SIZE]}
    lab.results.add("tree", spec.name, "captured widths", widths == expected if spec.graphs else not found, **widths)


async def executed(lab: Lab, running: Running, case: str) -> None:
    """The last step's trees in /server_info; the same in /metrics where they are on."""
    spec = running.spec
    state = ((await running.ask.get("/server_info")).body.get("internal_states") or [{}])[0]
    shape = state.get("executed") or {}
    nodes, children, depth = (shape.get(name, -1) for name in ("nodes", "max_children", "max_depth"))
    assert spec.budget is not None and spec.topk is not None
    ok = nodes == spec.budget and 1 <= children <= spec.topk and 1 <= depth <= min(BLOCK_SIZE - 1, spec.budget)
    metrics = (await running.ask.get("/metrics")).text
    lab.results.add("tree", spec.name, case, ok, **shape, metrics="sglang:" in metrics)


def _tell_length(lab: Lab, running: Running, got: Round, prompts: list[HeldOut]) -> None:
    """The commit length beside the reference engine's, where both are of the same prompts."""
    spec = running.spec
    if len(prompts) != REFERENCE_ROWS or spec.budget is None or spec.topk is None or spec.ladder or not got.drafts:
        return
    wanted = reference_commit_lengths().get((spec.budget, spec.topk))
    length = got.commit_length
    near = None if wanted is None or length is None else abs(length / wanted - 1) <= NEAR
    near = near if spec.dtype == "float32" else None
    lab.results.add("tree", spec.name, "commit length", near, here=length, reference=wanted)


def _compare(lab: Lab, rounds: dict[tuple[str, int], Round], concurrencies: tuple[int, ...]) -> None:
    for concurrency in concurrencies:
        for name, chain in CHAINS.items():
            ours, theirs = rounds.get((name, concurrency)), rounds.get((chain, concurrency))
            if ours is None or theirs is None:
                continue
            compared, wrong = differing(ours, theirs.outputs)
            steps = sum(a != b for a, b in zip(ours.steps, theirs.steps, strict=True))
            same = wrong == 0 and steps == 0 and compared == len(ours.outputs)
            # two batches of bf16 need not be the same ones above C=1
            ok = same if lab.servers[name].spec.dtype == "float32" or concurrency == 1 else None
            figures = {"differ": f"{wrong}/{compared}", "other_verify_steps": steps, "steps": ours.verify_steps}
            lab.results.add("tree", name, f"C={concurrency} against {chain}", ok, **figures)
        for name, eager in EAGER.items():
            ours, theirs = rounds.get((name, concurrency)), rounds.get((eager, concurrency))
            if ours is not None and theirs is not None:
                compared, wrong = differing(ours, theirs.outputs)
                steps = sum(a != b for a, b in zip(ours.steps, theirs.steps, strict=True))
                figures = {"differ": f"{wrong}/{compared}", "other_verify_steps": steps}
                lab.results.add("tree", name, f"C={concurrency} against eager", wrong == 0 and compared > 0, **figures)
