"""``ddtree tune``: the fastest exact shape for one objective, found with few cells, written as a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.app import JsonOption, ServiceOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.screen import Screen
from ddtree_ops.cli.sweep import (
    INCOMPLETE,
    Budgets,
    Lengths,
    OneHost,
    Pairs,
    PassLimit,
    Rows,
    RunFolder,
    TimeLimit,
    Topks,
    carry_out,
    command_line,
    numbers,
    one_host,
    words,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ddtree_ops.sweep.runner import Sweep
    from ddtree_ops.sweep.tune import Choice


@command("tune")
def tune(
    host: OneHost = None,
    service: ServiceOption = None,
    objective: Annotated[
        str, typer.Option("--objective", help="latency (C=1), throughput (C=128), or C=N for another.")
    ] = "latency",
    pair: Pairs = "",
    budget: Budgets = "",
    topk: Topks = "",
    prompts: Annotated[str | None, typer.Option("--prompts", help="held-out, coding, or a file.")] = None,
    max_tokens: Lengths = "",
    rows: Rows = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the shapes' order.")] = 1,
    name: Annotated[
        str | None, typer.Option("--name", help="The profile's name. Default: tuned-HOST-OBJECTIVE.")
    ] = None,
    pass_limit: PassLimit = 900,
    time_limit: TimeLimit = None,
    run: RunFolder = None,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Find the fastest exact shape, AR and chain included, and write it as a profile with its evidence.

    Shapes are tried briefly, larger budgets only while they gain; the fastest are measured in full and started twice.
    Rules of the inventory and of the GPUs' arch hold and are named. Nothing is deployed. Exit 3: cells are left.

    Examples: ddtree tune --host ct200 --objective C=8; ddtree deploy --host ct200 --profile tuned-ct200-c8
    """
    from ddtree_ops.cli.fleet import load
    from ddtree_ops.sweep.ask import Wishes, folder_of, make_tuning
    from ddtree_ops.sweep.records import opened
    from ddtree_ops.sweep.tune import choose
    from ddtree_ops.sweep.tune import objective as parse_objective

    screen, loaded = Screen(json_=json_), load(workspace)
    goal = parse_objective(objective)
    slug = goal.name.lower().replace("=", "")
    wishes = Wishes(
        pairs=words(pair),
        budgets=numbers("--budget", budget),
        topks=numbers("--topk", topk),
        prompts=[prompts] if prompts else (),
        max_tokens=numbers("--max-tokens", max_tokens),
        rows=rows,
        seed=seed,
        pass_limit_s=pass_limit,
        time_limit_s=None if time_limit is None else 60 * time_limit,
    )
    made, rungs, grid_loads = make_tuning(loaded, one_host(loaded, host), service, wishes, goal, command_line())
    folder = run or folder_of(loaded, made, f"tune-{slug}")
    question = f"{made.host}: stop {made.service}, try {len(made.shapes)} shapes briefly, then put it back?"
    if not screen.ask(question, yes=yes):
        return 1
    with opened(folder) as journal:
        outcome = carry_out(screen, made, journal)
        if outcome.left:
            screen.say(f"{outcome.left} cells are left: the same command goes on")
            if screen.json:
                screen.document({"ok": True, "complete": False, "left": outcome.left, "run": str(folder)})
            return INCOMPLETE
        choice = choose(made.shapes, rungs, outcome.done, grid_loads)
    path = write_profile(made, folder, choice, goal.name, name or f"tuned-{made.host}-{slug}")
    for line in said(made, choice):
        screen.say(line)
    screen.say(f"written: {path}. To deploy: ddtree deploy --host {made.host} --profile {path.stem}", "green")
    if screen.json:
        document = {"shape": choice.shape.name, "tokens_per_s": choice.tokens_per_s, "ran": choice.ran}
        screen.document({"ok": True, "complete": True, **document, "profile": str(path), "run": str(folder)})
    return 0


def said(made: Sweep, choice: Choice) -> list[str]:
    """What the choice rests on, line by line: also the comments of the profile."""
    from ddtree_ops.report.words import claim
    from ddtree_ops.sweep.profiles import rules_of

    accept = f", accept length {choice.accept_length:.2f}" if choice.accept_length else ""
    found = [f"{choice.shape.name}: {choice.tokens_per_s:.1f} tokens/s{accept}."]
    if choice.second is not None and choice.over_second is not None:
        found.append(claim(choice.shape.name, choice.second.name, choice.over_second) + ".")
    found.append(f"Ran {choice.ran}.")
    return found + [f"Rule: {rule}" for rule in rules_of(made.deployment(choice.shape))]


def write_profile(made: Sweep, folder: Path, choice: Choice, goal: str, name: str) -> Path:
    """Write the profile into the workspace, in place of an earlier one of ddtree tune's. Raises UsageError."""
    import re

    from ddtree_ops.cli.output import write_whole
    from ddtree_ops.errors import UsageError
    from ddtree_ops.model.check import NAME_FORM, NAME_TEXT
    from ddtree_ops.sweep.records import JOURNAL, sha256_of
    from ddtree_ops.sweep.tune import Objective, profile_text

    if not re.fullmatch(NAME_FORM, name):
        raise UsageError(f"--name {name!r}", hint=NAME_TEXT)
    top, records = made.workspace.path.resolve(), (folder / JOURNAL).resolve()
    if not records.is_relative_to(top):
        raise UsageError(f"{records} is outside the workspace, so no profile can name it", hint="--run inside it")
    path = made.workspace.path / "inventories" / "profiles" / f"{name}.yaml"
    if path.exists() and "Chosen by ddtree tune" not in path.read_text(encoding="utf-8"):
        raise UsageError(f"{path} is there and ddtree tune did not write it", hint="--name another")
    where = str(records.relative_to(top))
    text = profile_text(choice, Objective(goal, ()), made.host, where, sha256_of(records), said(made, choice))
    write_whole(path, text, "--name")
    return path
