"""Selection ``gate``: the project's own gate against real servers; its golden comes from AR on the same card."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from ddtree_ops.exactness import GatePlan, Kind, Prompt, Verdict, builtin_prompts, run_gate
from ddtree_ops.exactness.golden import FORMAT, Golden, Identity, Recording
from ddtree_ops.exactness.plan import Tree

from .lab import Lab, Running, Spec
from .tokens import HeldOut

NEW_TOKENS = 96
BLOCK_SIZE = 8
"""Of the pair's drafter."""
TIME_LIMIT_S = 240.0


def gate_prompts(held: list[HeldOut]) -> list[Prompt]:
    """Half of the gate's own, and as many of the pair's held-out text, on which the drafter is good."""
    own = [Prompt(id=f"held-out-{i}", kind="held-out", input_ids=prompt.ids) for i, prompt in enumerate(held[:12])]
    return [*builtin_prompts()[::4], *own]


def plan_of(running: Running, prompts: list[Prompt], methods: tuple[str, ...], golden: Golden | None) -> GatePlan:
    spec = running.spec
    exact = spec.dtype == "float32"
    return GatePlan(
        url=running.url,
        algorithm=spec.algorithm,
        dtype=spec.dtype,
        policy="exact" if exact else "near-tie",
        epsilon_roundings=4,
        concurrency=(1, 8),
        max_new_tokens=NEW_TOKENS,
        prompts=prompts,
        time_limit_s=TIME_LIMIT_S,
        vocab_size=2048,
        methods=methods,
        golden=golden if {"golden", "same-seed"} & set(methods) else None,
        min_accept_length=2.0 if spec.algorithm != "none" else None,
        prompt_set="tests/gpu",
        tree=tree_of(spec),
        expect={"speculative_num_draft_tokens": spec.budget + 1} if spec.budget is not None else {},
    )


def tree_of(spec: Spec) -> Tree | None:
    if spec.algorithm == "none":
        return None
    return Tree(block_size=BLOCK_SIZE, budget=spec.budget, topk=spec.topk, ladder=spec.ladder)


async def run_gate_selection(lab: Lab, held: list[HeldOut], cases: dict[str, tuple[str, ...]], recorded: str) -> None:
    """``cases``: server -> methods; ``recorded``: the AR server whose answers are the golden."""
    prompts = gate_prompts(held)
    recording = Recording()
    async with lab.hold(recorded) as (ar,):
        verdict = await asyncio.to_thread(
            run_gate, plan_of(ar, prompts, ("self-score", "replay"), None), None, recording
        )
        tell_verdict(lab, recorded, "recording", verdict)
    golden = golden_of(recording, {})

    async def one(name: str, methods: tuple[str, ...]) -> None:
        async with lab.hold(name) as (running,):
            verdict = await asyncio.to_thread(run_gate, plan_of(running, prompts, methods, golden))
        tell_verdict(lab, name, "-and-".join(methods) or "default", verdict)

    told = await asyncio.gather(*(one(name, methods) for name, methods in cases.items()), return_exceptions=True)
    for name, error in zip(cases, told, strict=True):
        if isinstance(error, BaseException):
            lab.results.add("gate", name, "all", False, why=repr(error))


def golden_of(recording: Recording, verify_counts: dict[str, dict[str, int]]) -> Golden:
    """verify_counts: by tree shape, of a server that is known to be right."""
    identity = Identity(
        model={}, dtype="float32", arch="", tp=1, engine_base="", prompts="tests/gpu", max_new_tokens=NEW_TOKENS
    )
    return Golden(
        format=FORMAT,
        identity=identity,
        prompts=recording.prompts,
        verify_counts=verify_counts,
        sampling=recording.sampling,
        sampled=recording.sampled,
    )


def tell_verdict(
    lab: Lab, name: str, case: str, verdict: Verdict, selection: str = "gate", caught: bool = False
) -> None:
    """``caught``: right is a verdict that does not pass, for what it should not."""
    folder: Path = lab.results.evidence / "verdicts"
    folder.mkdir(exist_ok=True)
    folder.joinpath(f"{name}-{case}.json").write_text(json.dumps(verdict.to_json(), indent=1) + "\n")
    folder.joinpath(f"{name}-{case}.txt").write_text("\n".join(verdict.lines()) + "\n")
    figures = {
        "kind": str(verdict.kind),
        "judged": verdict.counts.judged,
        "findings": verdict.counts.findings,
        "accept_length": verdict.accept_length,
        "reasons": [reason.code for reason in verdict.reasons if reason.effect != "note"],
        "gate_s": round(verdict.seconds, 1),
    }
    ok = verdict.kind is Kind.FAIL if caught else verdict.passed()
    lab.results.add(selection, name, case, ok, **figures)
