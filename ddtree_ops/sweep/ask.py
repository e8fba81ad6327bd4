"""A command line's wishes as a `Sweep`: shapes, loads, prompt sets, and the directory of its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment, Workspace, resolve
from ddtree_ops.sweep import grid, tune
from ddtree_ops.sweep.grid import AR, CHAIN, Load, Shape
from ddtree_ops.sweep.records import FOLDER
from ddtree_ops.sweep.runner import Sweep
from ddtree_ops.sweep.strategy import Strategy, whole_grid
from ddtree_ops.sweep.workload import ENOUGH, PromptSet, prompt_set

#: Requests a repeat at C=1, where nothing is shared that more of them would show.
ROWS_ALONE = 32


@dataclass(frozen=True)
class Wishes:
    """What a command line said; empty or None where it said nothing. ``rows``: requests a repeat at least."""

    pairs: Sequence[str] = ()
    budgets: Sequence[int] = ()
    topks: Sequence[int] = ()
    concurrency: Sequence[int] = ()
    prompts: Sequence[str] = ()
    max_tokens: Sequence[int] = ()
    rates: Sequence[float] = ()
    rows: int | None = None
    repeats: int = 3
    ar: bool = True
    chain: bool = True
    seed: int = 1
    pass_limit_s: float = 900.0
    time_limit_s: float | None = None


def shapes_of(wishes: Wishes) -> list[Shape]:
    """The shapes, AR first: it is the reference where it is swept. Raises UsageError."""
    trees = grid.parse_shapes(wishes.pairs, wishes.budgets, wishes.topks)
    if not (wishes.pairs or wishes.budgets):
        trees = [Shape("ddtree", budget, topk) for budget, topk in grid.PAIRS]
    return [*([AR] if wishes.ar else []), *([CHAIN] if wishes.chain else []), *trees]


def loads_of(wishes: Wishes, sets: Sequence[PromptSet], max_tokens: Sequence[int]) -> list[Load]:
    """The loads: every C (or rate) with every set and length, each with as many requests as its C needs."""
    found = []
    most = max(wishes.concurrency or grid.CONCURRENCY)
    for chosen in sets:
        for length in max_tokens:
            for concurrency in wishes.concurrency or grid.CONCURRENCY:
                rows = wishes.rows or (ROWS_ALONE if concurrency == 1 else ENOUGH)
                count = grid.requests_of(concurrency, rows)
                found.append(Load(concurrency, chosen.name, length, count, wishes.repeats))
            for rate in wishes.rates:
                found.append(Load(most, chosen.name, length, wishes.rows or ENOUGH, wishes.repeats, rate))
    return found


def make(workspace: Workspace, host: str, service: str | None, wishes: Wishes, command: str) -> Sweep:
    """The sweep, checked against the inventory before any host is asked. Raises UsageError."""
    if wishes.repeats < 3:
        raise UsageError(f"--repeats {wishes.repeats}", hint="at least 3: fewer have no spread to speak of")
    plain = resolve(workspace, host, service)
    if plain.profile.algorithm == "none" and plain.profile.drafter is None and not plain.service.base:
        raise UsageError(f"{plain.profile.name} has no drafter, so there is nothing to compare", hint="services: base:")
    shapes = shapes_of(wishes)
    sets = [prompt_set(name, plain.profile) for name in wishes.prompts or (None,)]
    loads = loads_of(wishes, sets, wishes.max_tokens or (default_length(plain),))
    return _checked(workspace, plain, wishes, shapes, loads, sets, whole_grid(shapes, loads, wishes.seed), command)


def make_tuning(
    workspace: Workspace, host: str, service: str | None, wishes: Wishes, goal: tune.Objective, command: str
) -> tuple[Sweep, list[list[Load]], int]:
    """The sweep of a tuning, its loads rung by rung, and the C that a whole grid would have. Raises UsageError."""
    plain = resolve(workspace, host, service)
    if not wishes.pairs and not wishes.budgets:
        wishes = replace(wishes, budgets=tune.BUDGETS, topks=tune.TOPKS)
    shapes = shapes_of(wishes)
    chosen = prompt_set(wishes.prompts[0] if wishes.prompts else None, plain.profile)
    length = (wishes.max_tokens or (default_length(plain),))[0]
    rows = wishes.rows or (ROWS_ALONE if max(goal.concurrency) == 1 else ENOUGH)
    rungs = tune.loads_for(goal, chosen.name, length, rows, wishes.repeats)
    loads = [load for rung in rungs for load in rung]
    strategy = tune.halving(shapes, rungs, wishes.seed)
    sweep = _checked(workspace, plain, wishes, shapes, loads, [chosen], strategy, command)
    return sweep, rungs, len(grid.CONCURRENCY)


def _checked(
    workspace: Workspace,
    plain: Deployment,
    wishes: Wishes,
    shapes: list[Shape],
    loads: list[Load],
    sets: Sequence[PromptSet],
    strategy: Strategy,
    command: str,
) -> Sweep:
    """The sweep of a service as the inventory has it (``plain``), sets and shapes tried on it. Raises UsageError."""
    for chosen in sets:
        refuse_too_long(plain, chosen, loads)
    sweep = Sweep(
        workspace=workspace,
        host=plain.host.name,
        service=plain.service_name,
        shapes=shapes,
        loads=loads,
        sets={chosen.name: chosen for chosen in sets},
        strategy=strategy,
        seed=wishes.seed,
        command=command,
        pass_limit_s=wishes.pass_limit_s,
        time_limit_s=wishes.time_limit_s,
    )
    for shape in shapes:
        sweep.deployment(shape)
    return sweep


def default_length(deployment: Deployment) -> int:
    """512 new tokens as in the reference tables; the tiny pair was trained on less."""
    return 128 if deployment.profile.model.startswith("release:pair/") else 512


def refuse_too_long(deployment: Deployment, chosen: PromptSet, loads: Sequence[Load]) -> None:
    """Raises UsageError where a prompt and its answer would not fit into the profile's context."""
    context = deployment.profile.context_length
    lengths = [len(prompt) for prompt in chosen.prompts if not isinstance(prompt, str)]
    longest = max((load.max_tokens for load in loads if load.prompts == chosen.name), default=0)
    if context is not None and lengths and max(lengths) + longest > context:
        raise UsageError(
            f"{chosen.name}: a prompt of {max(lengths)} tokens and {longest} new ones exceed the context of {context}",
            hint="--max-tokens",
        )


def folder_of(workspace: Workspace, sweep: Sweep, kind: str = "") -> Path:
    """Where the run lies unless the command line names a place: one directory for one set of wishes."""
    asked = [sweep.host, sweep.service, [s.name for s in sweep.shapes], [x.name for x in sweep.loads], sweep.seed, kind]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
    return workspace.path / FOLDER / f"{sweep.host}-{sweep.service}-{kind}{'-' if kind else ''}{digest}"
