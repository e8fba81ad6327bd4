"""What a sweep measures, as values: shapes, cells, starts; and the order in which they come. Pure.

A *shape* is how the service decodes: AR, chain, or a tree of budget and topk. A *cell* is one shape under one load.
A *start* is one start of the service with a shape's arguments; all cells of a shape are measured in it, one after
another, and the gate runs once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from ddtree_ops.errors import UsageError

Algorithm: TypeAlias = Literal["none", "dflash", "ddtree"]
#: The reference tables' trees (design.md, "Measuring") and loads.
PAIRS = ((8, 4), (16, 4), (16, 8), (24, 6), (32, 8), (48, 8))
CONCURRENCY = (1, 8, 32, 64, 128)
#: One start of the reference shape before the others, one after so many of them, one at the end.
REFERENCE_EVERY = 4


class Shape(msgspec.Struct, frozen=True, order=True):
    """``budget`` and ``topk`` of a tree; both None for AR (``none``) and the chain (``dflash``)."""

    algorithm: Algorithm
    budget: int | None = None
    topk: int | None = None

    @property
    def name(self) -> str:
        """``ar``, ``chain``, ``b8k4``: the names of the packaged profiles."""
        if self.algorithm == "ddtree":
            return f"b{self.budget}k{self.topk}"
        return "ar" if self.algorithm == "none" else "chain"

    @property
    def width(self) -> tuple[int, int]:
        """For sorting: AR, chain, then trees by budget and topk."""
        first = {"none": -2, "dflash": -1, "ddtree": self.budget or 0}[self.algorithm]
        return first, self.topk or 0


AR = Shape("none")
CHAIN = Shape("dflash")


class Load(msgspec.Struct, frozen=True, order=True):
    """Requests of one cell: ``concurrency`` in flight (closed loop) or arriving at ``rate`` a second (Poisson; then
    ``concurrency`` is how many the server must be able to run). ``requests`` a repeat, each of exactly ``max_tokens``
    new tokens.
    """

    concurrency: int
    prompts: str
    max_tokens: int
    requests: int
    repeats: int
    rate: float | None = None

    @property
    def name(self) -> str:
        """As tables and journals name it."""
        how = f"C={self.concurrency}" if self.rate is None else f"{self.rate:g}/s"
        return f"{how} {self.prompts} x{self.max_tokens} {self.repeats}x{self.requests}"


class Cell(msgspec.Struct, frozen=True, order=True):
    """One shape under one load in the shape's ``start``-th start (from 1): the key of its record."""

    shape: Shape
    load: Load
    start: int = 1

    @property
    def name(self) -> str:
        return f"{self.shape.name}#{self.start} {self.load.name}"


class Start(msgspec.Struct, frozen=True):
    """A start of the service and what is measured in it, in order."""

    shape: Shape
    number: int
    cells: tuple[Cell, ...]


def parse_shapes(pairs: Sequence[str], budgets: Sequence[int], topks: Sequence[int]) -> list[Shape]:
    """Trees from ``8/4`` pairs, or from every budget with every topk. Raises UsageError for neither form."""
    if pairs and (budgets or topks):
        raise UsageError("--pair and --budget/--topk name trees in two ways", hint="give one of them")
    if bool(budgets) != bool(topks):
        raise UsageError("--budget and --topk go together", hint="--budget 8,16 --topk 4,8, or --pair 8/4")
    found = []
    for pair in pairs:
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", pair)
        if match is None or not int(match[1]) or not int(match[2]):
            raise UsageError(f"--pair {pair!r}", hint="BUDGET/TOPK, such as 8/4")
        found.append(Shape("ddtree", int(match[1]), int(match[2])))
    found += [Shape("ddtree", budget, topk) for budget in budgets for topk in topks]
    return sorted(set(found), key=lambda shape: shape.width)


def requests_of(concurrency: int, rows: int) -> int:
    """Requests a repeat: ``rows``, and enough of them that a steady part remains between the first and last C."""
    return max(rows, 3 * concurrency if concurrency > 1 else 1)


def starts_of(shapes: Sequence[Shape], loads: Sequence[Load], seed: int) -> list[Start]:
    """One start a shape, neighbours in random order by ``seed``, the first shape's again in between and at the end.

    The first shape is the reference: its later starts hold its first load alone, so that drift is seen.
    """
    chance = random.Random(seed)
    reference, others = shapes[0], list(shapes[1:])
    chance.shuffle(others)

    turns = [(reference, loads)]
    for index, shape in enumerate(others, start=1):
        turns.append((shape, loads))
        if index % REFERENCE_EVERY == 0 or index == len(others):
            turns.append((reference, loads[:1]))
    found: list[Start] = []
    for shape, chosen in turns:
        order = list(chosen)
        chance.shuffle(order)
        number = 1 + sum(one.shape == shape for one in found)
        found.append(Start(shape, number, tuple(Cell(shape, load, number) for load in order)))
    return found


def merged(starts: Sequence[Start]) -> list[Start]:
    """The same starts with those of one shape and number joined, each cell once, in the order of first mention."""
    found: dict[tuple[Shape, int], dict[Cell, None]] = {}
    for start in starts:
        found.setdefault((start.shape, start.number), {}).update(dict.fromkeys(start.cells))
    return [Start(shape, number, tuple(cells)) for (shape, number), cells in found.items()]
