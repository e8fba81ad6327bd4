"""Selection ``faults``: the gate against servers with one planted fault each; the canary against what it must stop.

The golden is AR's on the same card, and the verify counts in it are of the healthy tree, which the gate must pass.
"""

from __future__ import annotations

import asyncio

from ddtree_ops.exactness import run_gate
from ddtree_ops.exactness.golden import Recording

from .judged import gate_prompts, golden_of, plan_of, tell_verdict, tree_of
from .lab import Lab
from .tokens import HeldOut

METHODS = ("self-score", "golden")
GATES = 3
"""That run at a time."""


async def run_faults(lab: Lab, held: list[HeldOut], names: tuple[str, ...], recorded: str, healthy: str) -> None:
    """``names``: servers with faults, those that the canary stops among them."""
    prompts = gate_prompts(held)
    of_ar, of_tree = Recording(), Recording()
    async with lab.hold(recorded) as (ar,):
        await asyncio.to_thread(run_gate, plan_of(ar, prompts, ("self-score",), None), None, of_ar)
    async with lab.hold(healthy) as (running,):
        await asyncio.to_thread(run_gate, plan_of(running, prompts, ("self-score",), None), None, of_tree)
        tree = tree_of(running.spec)
        assert tree is not None
        golden = golden_of(of_ar, {tree.shape: of_tree.verify_counts})
        verdict = await asyncio.to_thread(run_gate, plan_of(running, prompts, METHODS, golden))
    tell_verdict(lab, healthy, "healthy", verdict, "faults")

    # All at once they share the card and the cores until no gate is done within its limit.
    few = asyncio.Semaphore(GATES)

    async def one(name: str) -> None:
        spec = lab.servers[name].spec
        try:
            async with lab.hold(name) as (running,), few:
                verdict = await asyncio.to_thread(run_gate, plan_of(running, prompts, METHODS, golden))
        except LookupError as error:
            stopped = "DDTREE start-up canary" in lab.servers[name].log.read_text(errors="replace")
            lab.results.add("faults", name, "canary", stopped and not spec.starts, why=str(error))
            return
        if not spec.starts:
            lab.results.add("faults", name, "canary", None if lab.trees is None else False, why="it started")
        tell_verdict(lab, name, "gate", verdict, "faults", caught=True)

    told = await asyncio.gather(*(one(name) for name in names), return_exceptions=True)
    for name, error in zip(names, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("faults", name, "all", False, why=repr(error))
