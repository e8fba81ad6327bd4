"""Which starts a sweep wants, given what it knows so far. Pure: the same records give the same starts again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ddtree_ops.sweep.grid import Cell, Load, Shape, Start, merged, starts_of
from ddtree_ops.sweep.records import Measured

Done: TypeAlias = Mapping[Cell, Measured]
#: All starts wanted so far, those done included; asked again after each start.
Strategy: TypeAlias = Callable[[Done], list[Start]]
SECOND = 2


def whole_grid(shapes: Sequence[Shape], loads: Sequence[Load], seed: int) -> Strategy:
    """Every shape under every load, then second starts of those that will be compared (`contenders`)."""
    first = starts_of(shapes, loads, seed)

    def wanted(done: Done) -> list[Start]:
        if outstanding(first, done):
            return first
        return merged([*first, *second_starts(first, loads, done)])

    return wanted


def outstanding(starts: Sequence[Start], done: Done) -> list[Start]:
    """The starts that have cells without a record, with those cells alone."""
    left = [Start(s.shape, s.number, tuple(cell for cell in s.cells if cell not in done)) for s in starts]
    return [start for start in left if start.cells]


def throughput(record: Measured | None) -> float | None:
    """The median over a cell's repeats, tokens/s; None for a cell without figures."""
    if record is None or record.status != "ok" or not record.repeats:
        return None
    return statistics.median(repeat.throughput for repeat in record.repeats)


def contenders(load: Load, shapes: Sequence[Shape], done: Done) -> list[Shape]:
    """Whose first starts are worth a second: the two fastest, the fastest tree, and the fastest that is none."""
    speeds = {shape: throughput(done.get(Cell(shape, load, 1))) for shape in shapes}
    ranked = sorted((s for s in shapes if speeds[s] is not None), key=lambda s: -(speeds[s] or 0.0))
    trees = [shape for shape in ranked if shape.algorithm == "ddtree"]
    plain = [shape for shape in ranked if shape.algorithm != "ddtree"]
    return list(dict.fromkeys([*ranked[:2], *trees[:1], *plain[:1]]))


def second_starts(first: Sequence[Start], loads: Sequence[Load], done: Done) -> list[Start]:
    """One start more, for the loads in which a shape is a contender and has one start only."""
    shapes = list(dict.fromkeys(start.shape for start in first))
    cells: dict[Shape, list[Load]] = {}
    for load in loads:
        for shape in contenders(load, shapes, done):
            if sum(Cell(shape, load, start.number) in start.cells for start in first if start.shape == shape) < SECOND:
                cells.setdefault(shape, []).append(load)
    found = []
    for shape, chosen in cells.items():
        number = 1 + max(start.number for start in first if start.shape == shape)
        found.append(Start(shape, number, tuple(Cell(shape, load, number) for load in chosen)))
    return found


def remaining_s(starts: Sequence[Start], done: Done, start_s: Sequence[float]) -> float | None:
    """About how long the starts still take, in seconds: the median start and the median cell of the same load.

    None while nothing was measured. ``start_s``: what earlier starts took beside their cells.
    """
    left = outstanding(starts, done)
    by_load: dict[Load, list[float]] = {}
    for record in done.values():
        if record.status == "ok":
            by_load.setdefault(record.cell.load, []).append(record.wall_s)
    if not by_load:
        return None
    every = statistics.median([value for values in by_load.values() for value in values])
    total = len(left) * (statistics.median(start_s) if start_s else 0.0)
    for start in left:
        for cell in start.cells:
            total += statistics.median(by_load[cell.load]) if cell.load in by_load else every
    return total
