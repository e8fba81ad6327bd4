"""A run's records as tables of cells that may be compared, and why others may not. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddtree_ops.sweep.grid import Load, Shape
from ddtree_ops.sweep.records import Measured, Record, Repeat, Run, Started
from ddtree_ops.sweep.stats import Interval, Speeds, median_interval

IDENTITY_WORDS = {
    "tp": "parallelism",
    "pp": "parallelism",
    "ep": "parallelism",
    "weights": "model",
    "drafter": "model",
}


class Result(NamedTuple):
    """One shape under one load, all its starts together. ``records``: those with figures; ``failed``: the others."""

    shape: Shape
    load: Load
    records: list[Measured]
    failed: list[Measured]

    @property
    def repeats(self) -> list[Repeat]:
        """Of all starts."""
        return [repeat for record in self.records for repeat in record.repeats]

    @property
    def throughput(self) -> Interval | None:
        """Tokens/s in the steady window: the median of all repeats."""
        return median_interval([repeat.throughput for repeat in self.repeats]) if self.repeats else None

    @property
    def accept_length(self) -> float | None:
        """Commit length over all repeats, up to EOS."""
        rows = [row for repeat in self.repeats for row in repeat.rows if row.steps_until_eos]
        steps = sum(row.steps_until_eos or 0 for row in rows)
        return sum(row.until_eos - 1 for row in rows) / steps if steps else None

    def median(self, of: str) -> float | None:
        """The median over the repeats of a figure by its name."""
        values = [value for repeat in self.repeats if (value := getattr(repeat, of)) is not None]
        return statistics.median(values) if values else None

    @property
    def looping(self) -> float:
        """The share of outputs that end in a cycle."""
        rows = [row for repeat in self.repeats for row in repeat.rows]
        return sum(row.loops for row in rows) / len(rows) if rows else 0.0

    def speeds(self) -> Speeds:
        """By start: each prompt's tokens/s, over the start's repeats."""
        found: dict[str, dict[int, float]] = {}
        for record in self.records:
            spent: dict[int, tuple[int, float]] = {}
            for row in (row for repeat in record.repeats for row in repeat.rows):
                tokens, seconds = spent.get(row.prompt, (0, 0.0))
                spent[row.prompt] = (tokens + row.tokens, seconds + row.seconds)
            found[record.txn or ""] = {prompt: tokens / seconds for prompt, (tokens, seconds) in spent.items()}
        return found


class Group(NamedTuple):
    """Cells that may stand in one table: one identity, one prompt set, one output length, one way of arriving."""

    identity: dict[str, Any]
    prompts: str
    max_tokens: int
    open_loop: bool
    results: list[Result]

    def get(self, shape: Shape, load: Load) -> Result | None:
        """The result of a cell, with figures."""
        return next((r for r in self.results if r.shape == shape and r.load == load and r.records), None)

    @property
    def loads(self) -> list[Load]:
        """By C; of several sizes of one C the largest (a tune's short passes are no part of the table)."""
        largest: dict[tuple[int, float], Load] = {}
        for load in sorted({result.load for result in self.results}, key=lambda load: load.requests * load.repeats):
            largest[(load.concurrency, load.rate or 0.0)] = load
        return [largest[key] for key in sorted(largest)]

    @property
    def shapes(self) -> list[Shape]:
        """AR, chain, then the trees."""
        return sorted({result.shape for result in self.results}, key=lambda shape: shape.width)


def header(records: Sequence[Record]) -> Run:
    """The run's header. Raises ValueError where there is none."""
    if not records or not isinstance(records[0], Run):
        raise ValueError("no run")
    return records[0]


def groups(records: Sequence[Record]) -> list[Group]:
    """The tables of a run, those with most cells first. A cell that never started stands with the first start's."""
    started = _identities([record for record in records if isinstance(record, Started)])
    fallback = next(iter(started.values()), {})
    found: dict[str, Group] = {}
    latest: dict[Any, Measured] = {}
    for record in records:
        if isinstance(record, Measured):
            latest[record.cell] = record
    for record in latest.values():
        load = record.cell.load
        identity = started.get(record.txn or "", fallback)
        key = repr((sorted(identity.items(), key=str), load.prompts, load.max_tokens, load.rate is not None))
        group = found.setdefault(key, Group(identity, load.prompts, load.max_tokens, load.rate is not None, []))
        result = next((r for r in group.results if r.shape == record.cell.shape and r.load == load), None)
        if result is None:
            result = Result(record.cell.shape, load, [], [])
            group.results.append(result)
        (result.records if record.status == "ok" else result.failed).append(record)
    return sorted(found.values(), key=lambda group: -len(group.results))


def _identities(starts: Sequence[Started]) -> dict[str, dict[str, Any]]:
    """By transaction. AR, which drafts nothing, has the drafter of all others, if that is one."""
    drafters = {drafter for start in starts if (drafter := start.identity.get("drafter")) is not None}
    only = drafters.pop() if len(drafters) == 1 else None
    return {s.txn: {**s.identity, "drafter": s.identity.get("drafter") or only} for s in starts}


def why_apart(one: Group, other: Group) -> list[str]:
    """In which words two tables differ, so that they are two."""
    found = []
    for key in sorted({*one.identity, *other.identity}):
        if one.identity.get(key) != other.identity.get(key):
            word = IDENTITY_WORDS.get(key, key)
            found.append(f"{word}: {key} {one.identity.get(key)} and {other.identity.get(key)}")
    if one.prompts != other.prompts:
        found.append(f"workload: prompts {one.prompts} and {other.prompts}")
    if one.max_tokens != other.max_tokens:
        found.append(f"workload: {one.max_tokens} and {other.max_tokens} new tokens")
    if one.open_loop != other.open_loop:
        found.append("workload: closed loop and Poisson arrivals")
    return found
