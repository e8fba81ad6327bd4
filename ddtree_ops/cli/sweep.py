"""``ddtree sweep``: every shape under every load, measured where it will run, and the host left as it was."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli import complete
from ddtree_ops.cli.app import JsonOption, ServiceOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_ops.sweep.records import Journal, Measured
    from ddtree_ops.sweep.runner import Outcome, Sweep

OneHost = Annotated[
    str | None, typer.Option("--host", metavar="NAME", help="Host of the inventory.", autocompletion=complete.hosts)
]
Pairs = Annotated[str, typer.Option("--pair", metavar="B/K,..", help="Trees: 8/4,16/4. Default: the six of the table.")]
Budgets = Annotated[str, typer.Option("--budget", metavar="N,..", help="With --topk: every budget with every topk.")]
Topks = Annotated[str, typer.Option("--topk", metavar="N,..", help="With --budget.")]
Concurrencies = Annotated[str, typer.Option("-c", "--concurrency", metavar="N,..", help="Default: 1,8,32,64,128.")]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompts", help="held-out, coding, or a file (docs/sweep.md); several times.")
]
Lengths = Annotated[str, typer.Option("--max-tokens", metavar="N,..", help="New tokens a request. Default: 512.")]
Rows = Annotated[
    int | None, typer.Option("--rows", min=1, help="Requests a repeat, at least. Default: 32, at C>1 128.")
]
PassLimit = Annotated[float, typer.Option("--pass-limit", min=1, help="Seconds after which a pass counts as a hang.")]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", min=1, help="Minutes after which no cell begins; run again to go on.")
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", help="The run's directory. Default: by what is asked.", autocompletion=complete.runs),
]
#: Cells left when the time is over: like a plan with changes, there is something to do.
INCOMPLETE = 3
NOT_EXACT = 4


@command("sweep")
def sweep(
    host: OneHost = None,
    service: ServiceOption = None,
    pair: Pairs = "",
    budget: Budgets = "",
    topk: Topks = "",
    ar: Annotated[bool, typer.Option("--ar/--no-ar", help="Without speculation too; the reference.")] = True,
    chain: Annotated[bool, typer.Option("--chain/--no-chain", help="DFlash's linear draft too.")] = True,
    concurrency: Concurrencies = "",
    rate: Annotated[str, typer.Option("--rate", metavar="N,..", help="Poisson arrivals a second, as cells too.")] = "",
    prompts: Prompts = None,
    max_tokens: Lengths = "",
    rows: Rows = None,
    repeats: Annotated[int, typer.Option("--repeats", min=3, help="Passes of each cell after the warm-up.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the cells' order.")] = 1,
    pass_limit: PassLimit = 900,
    time_limit: TimeLimit = None,
    run: RunFolder = None,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Measure AR, chain and DDTree shapes on a host, each proven exact first; the host ends as it began.

    Every start goes through the deploy path and is never confirmed. What is measured is kept line by line: the same
    command goes on where it stopped. Exit 3: cells are left; 4: some shape was not exact.

    Examples: ddtree sweep --host ct200 --pair 8/4,16/4 -c 1,8 --time-limit 120;
    ddtree sweep --host ct200 --budget 8,16,32 --topk 4,8 -c 64 --no-chain
    """
    from ddtree_ops.cli.fleet import load
    from ddtree_ops.sweep.ask import Wishes, folder_of, make
    from ddtree_ops.sweep.records import opened

    screen = Screen(json_=json_)
    loaded = load(workspace)
    wishes = Wishes(
        pairs=words(pair),
        budgets=numbers("--budget", budget),
        topks=numbers("--topk", topk),
        concurrency=numbers("--concurrency", concurrency),
        prompts=prompts or (),
        max_tokens=numbers("--max-tokens", max_tokens),
        rates=rates(rate),
        rows=rows,
        repeats=repeats,
        ar=ar,
        chain=chain,
        seed=seed,
        pass_limit_s=pass_limit,
        time_limit_s=None if time_limit is None else 60 * time_limit,
    )
    made = make(loaded, one_host(loaded, host), service, wishes, command_line())
    folder = run or folder_of(loaded, made)
    total = sum(len(start.cells) for start in made.strategy({}))
    what = f"{len(made.shapes)} shapes, {total} cells"
    if not screen.ask(f"{made.host}: stop {made.service} and start it for {what}, then put it back?", yes=yes):
        return 1
    with opened(folder) as journal:
        outcome = carry_out(screen, made, journal)
    return finish(screen, folder, outcome)


def carry_out(screen: Screen, made: Sweep, journal: Journal) -> Outcome:
    """Run it: a live table on a terminal, else a line for each cell that ends."""
    from ddtree_ops.cli.livetable import LiveTable
    from ddtree_ops.sweep.runner import run as run_sweep

    with LiveTable(screen, len(journal.records), journal, line, minutes) as live:
        return run_sweep(made, journal, live, live.watch)


def finish(screen: Screen, folder: Path, outcome: Outcome) -> int:
    """The table of all cells, where they lie, and the exit code."""
    records = sorted(outcome.done.values(), key=lambda r: (r.cell.shape.width, r.cell.load, r.cell.start))
    rows = [table_row(record) for record in records]
    wrong = [record for record in records if record.status == "not-exact"]
    if screen.json:
        document = {
            "ok": not wrong,
            "run": str(folder),
            "complete": not outcome.left,
            "left": outcome.left,
            "cells": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
        }
        screen.document(document)
    else:
        screen.table("", COLUMNS, rows)
        more = f"{outcome.left} cells are left: the same command goes on" if outcome.left else "complete"
        screen.say(f"{len(records)} cells in {folder}; {more}. See: ddtree report {folder}")
    for record in wrong:
        screen.warn(f"{record.cell.name} is not exact: {record.reason}")
    return NOT_EXACT if wrong else INCOMPLETE if outcome.left else 0


COLUMNS = ("shape", "start", "load", "result", "tokens/s", "accept length")


def table_row(record: Measured) -> list[str]:
    """One cell as strings, under COLUMNS."""
    from ddtree_ops.sweep.strategy import throughput

    speed = throughput(record)
    accept = next((r.accept_length for r in record.repeats if r.accept_length), None)
    result = record.status if record.status == "ok" else f"{record.status}: {record.reason[:120]}"
    return [
        record.cell.shape.name,
        str(record.cell.start),
        record.cell.load.name,
        result,
        "" if speed is None else f"{speed:.1f}",
        "" if accept is None else f"{accept:.2f}",
    ]


def line(record: Measured) -> str:
    """One cell that ended, for the log."""
    _, _, _, result, speed, accept = table_row(record)
    how = f"{speed} tokens/s" + (f", accept length {accept}" if accept else "") if speed else result
    return f"{record.cell.name}: {how}"


def minutes(seconds: float) -> str:
    """``3 min`` or ``2 h 10 min``."""
    whole = max(1, round(seconds / 60))
    return f"{whole} min" if whole < 60 else f"{whole // 60} h {whole % 60} min"


def one_host(loaded: Any, host: str | None) -> str:
    """The one host that a command line means. Raises UsageError."""
    from ddtree_ops.cli.fleet import host_names
    from ddtree_ops.errors import UsageError

    names = host_names(loaded, None if host is None else [host])
    if len(names) != 1:
        raise UsageError("one host at a time", hint="--host " + " | ".join(names))
    return names[0]


def words(text: str) -> list[str]:
    """Comma-separated words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(option: str, text: str) -> Sequence[int]:
    """Comma-separated whole numbers above 0, each once. Raises UsageError."""
    from ddtree_ops.errors import UsageError

    found = words(text)
    if any(not word.isdigit() or not 0 < int(word) < 1 << 20 for word in found):
        raise UsageError(f"{option} {text!r}", hint="whole numbers above 0, such as 8,16")
    return list(dict.fromkeys(int(word) for word in found))


def rates(text: str) -> list[float]:
    """Comma-separated requests a second. Raises UsageError."""
    from ddtree_ops.errors import UsageError

    try:
        found = [float(word) for word in words(text)]
    except ValueError:
        found = [0.0]
    if any(not 0 < value < 1e6 for value in found):
        raise UsageError(f"--rate {text!r}", hint="requests a second, such as 0.5,2")
    return found


def command_line() -> str:
    """What was typed, for the run's header: how to repeat it."""
    return shlex.join(["ddtree", *sys.argv[1:]])
