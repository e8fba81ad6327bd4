"""Which shape is fastest for one objective: many shapes briefly, few of them in full.

A start of the service costs more than a cell, so the first rung already leaves out what cannot win: budgets beyond two
that were slower. The fastest few of it are measured in full, and those that are compared are started twice, so that the
choice has an interval. Pure: the runner does what `halving` wants.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.sweep.grid import CONCURRENCY, Cell, Load, Shape, Start, requests_of
from ddtree_ops.sweep.stats import Ratio, paired_ratio
from ddtree_ops.sweep.strategy import Done, Strategy, outstanding, second_starts, throughput
from ddtree_ops.sweep.tables import Result

BUDGETS, TOPKS = (8, 16, 24, 32, 48), (4, 6, 8)
FINALISTS, MOST = 3, 5
SHORT_REPEATS = 1
#: The short rung's requests are this part of a whole cell's.
GROWTH = 4
#: Two starts of one configuration differ by less than this share; STRIKES budgets beyond it close a line.
MARGIN, STRIKES = 0.05, 2


@dataclass(frozen=True)
class Objective:
    """``concurrency``: the loads that count. The score is the geometric mean of their steady tokens/s."""

    name: str
    concurrency: tuple[int, ...]


def objective(text: str) -> Objective:
    """``latency`` (C=1), ``throughput`` (the table's largest C) or ``C=8``. Raises UsageError."""
    if text == "latency":
        return Objective(text, (1,))
    if text == "throughput":
        return Objective(text, (max(CONCURRENCY),))
    value = text.removeprefix("C=")
    if value != text and value.isdigit() and 0 < int(value) <= 4096:
        return Objective(text, (int(value),))
    raise UsageError(f"--objective {text!r}", hint="latency, throughput, or C=N such as C=8")


def loads_for(goal: Objective, prompts: str, max_tokens: int, rows: int, repeats: int) -> list[list[Load]]:
    """Loads rung by rung: the last is a whole cell, the ones before it shorter."""
    found: list[list[Load]] = []
    for short in (GROWTH, 1):
        rung = []
        for concurrency in goal.concurrency:
            full = requests_of(concurrency, rows)
            count = full if short == 1 else max(min(full, 2 * concurrency), full // short)
            rung.append(Load(concurrency, prompts, max_tokens, count, repeats if short == 1 else SHORT_REPEATS))
        found.append(rung)
    return found


def score(shape: Shape, loads: Sequence[Load], done: Done, number: int = 1) -> float | None:
    """Geometric mean of the medians; None where a load has no figures (not exact, refused, failed)."""
    speeds = [throughput(done.get(Cell(shape, load, number))) for load in loads]
    return None if any(not s for s in speeds) else math.exp(statistics.fmean(math.log(s) for s in speeds if s))


def tried(shapes: Sequence[Shape], loads: Sequence[Load], done: Done) -> list[Shape]:
    """The shapes that the first rung wants so far: AR and chain, then each topk's budgets upwards until a line closes.

    A line is closed by two budgets in a row that are slower than its best by more than MARGIN, or have no figures: a
    larger budget costs more a step and its gain in acceptance shrinks.
    """
    found = [shape for shape in shapes if shape.algorithm != "ddtree"]
    trees = [shape for shape in shapes if shape.algorithm == "ddtree"]
    for topk in dict.fromkeys(shape.topk for shape in trees):
        best, strikes = 0.0, 0
        for shape in sorted((shape for shape in trees if shape.topk == topk), key=lambda shape: shape.width):
            found.append(shape)
            if any(Cell(shape, load, 1) not in done for load in loads):
                break  # what comes next depends on it
            speed = score(shape, loads, done) or 0.0
            strikes = strikes + 1 if speed < best * (1 - MARGIN) or not speed else 0
            best = max(best, speed)
            if strikes == STRIKES:
                break
    return found


def finalists(shapes: Sequence[Shape], loads: Sequence[Load], done: Done) -> list[Shape]:
    """The fastest FINALISTS, and up to MOST that are within MARGIN of the best."""
    scored = [(value, shape) for shape in shapes if (value := score(shape, loads, done)) is not None]
    ranked = sorted(scored, key=lambda item: (-item[0], item[1].width))
    near = [shape for value, shape in ranked if value >= ranked[0][0] * (1 - MARGIN)]
    return [shape for _, shape in ranked][: min(MOST, max(FINALISTS, len(near)))]


def halving(shapes: Sequence[Shape], rungs: Sequence[Sequence[Load]], seed: int) -> Strategy:
    """First what `tried` wants on the short rung, then the finalists in full, the two that are compared twice.

    The first shape starts once more at the end of the short rung, so that drift is seen.
    """
    short, full = rungs[0], rungs[-1]
    order = [shapes[0], *random.Random(seed).sample(list(shapes[1:]), len(shapes) - 1)]

    def wanted(done: Done) -> list[Start]:
        chosen = tried(order, short, done)
        starts = [_start(shape, 1, short) for shape in chosen]
        if outstanding(starts, done):
            return starts
        starts.append(_start(order[0], 2, short))
        starts += (final := [_start(shape, 1, full) for shape in finalists(chosen, short, done)])
        if outstanding(starts, done):
            return starts
        return [*starts, *second_starts(final, full, done)]

    return wanted


def _start(shape: Shape, number: int, loads: Sequence[Load]) -> Start:
    return Start(shape, number, tuple(Cell(shape, load, number) for load in loads))


@dataclass(frozen=True)
class Choice:
    """The chosen shape, how it compares with the second and with AR, and how much of the grid was run."""

    shape: Shape
    second: Shape | None
    over_second: Ratio | None
    tokens_per_s: float
    accept_length: float | None
    ran: str


def choose(shapes: Sequence[Shape], rungs: Sequence[Sequence[Load]], done: Done, grid_loads: int) -> Choice:
    """The fastest of the finalists by all their starts. Raises Failed where no shape has figures."""
    full = rungs[-1]
    results: dict[Shape, list[Result]] = {}
    for shape in shapes:
        per_load = [
            Result(shape, load, [r for c, r in done.items() if (c.shape, c.load, r.status) == (shape, load, "ok")], [])
            for load in full
        ]
        if all(result.records for result in per_load):
            results[shape] = per_load
    if not results:
        raise Failed("no shape was measured in full, so none is chosen", hint="see the cells' reasons: ddtree report")

    def speed(shape: Shape) -> float:
        speeds = [result.throughput.value for result in results[shape] if result.throughput]
        return math.exp(statistics.fmean(math.log(value) for value in speeds))

    ranked = sorted(results, key=lambda shape: (-speed(shape), shape.width))
    first, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    over = None
    if second is not None:
        over = paired_ratio(results[first][0].speeds(), results[second][0].speeds())
    whole = sum(cell.load in full for cell in done)
    short = len(done) - whole
    ran = (
        f"{whole} cells in full and {short} short ones, of a grid of {len(shapes)} shapes x {grid_loads} C = "
        f"{len(shapes) * grid_loads} cells"
    )
    return Choice(first, second, over, speed(first), results[first][0].accept_length, ran)


def profile_text(choice: Choice, goal: Objective, host: str, records: str, sha256: str, said: Sequence[str]) -> str:
    """The profile file: the shape, the evidence, and in comments what was found and which rules applied."""
    values: dict[str, object] = {"algorithm": choice.shape.algorithm}
    if choice.shape.algorithm == "ddtree":
        # none of a base either: what was measured had none
        values |= {"budget": choice.shape.budget, "topk": choice.shape.topk, "ladder": None}
    lines = [f"Chosen by ddtree tune for {goal.name} on {host}.", *said]
    comments = "".join(f"# {''.join(c if c.isprintable() else ' ' for c in line)}\n" for line in lines)
    # Quoted by hand: some hashes look like numbers to one YAML or another.
    evidence = f"evidence:\n  records: {json.dumps(records)}\n  sha256: {json.dumps(sha256)}\n"
    return comments + yaml.safe_dump(values, sort_keys=False) + evidence
