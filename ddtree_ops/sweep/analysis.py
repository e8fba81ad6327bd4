"""What a run's records say: tables that may be compared, best shapes, crossovers, predictions, and findings. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddtree_ops.sweep.ceiling import SHARE
from ddtree_ops.sweep.grid import AR, CHAIN, Load, Shape
from ddtree_ops.sweep.records import Client, Ended, Measured, Record, Repeat, Run, Started
from ddtree_ops.sweep.stats import Interval, Ratio, Speeds, median_interval, paired_ratio

#: A cell's accept length may differ from another C's by this share before it is a finding.
ACCEPT_BOUND = 0.01
IDENTITY_WORDS = {"tp": "parallelism", "pp": "parallelism", "ep": "parallelism", "weights": "model"}


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
    started = {record.txn: record for record in records if isinstance(record, Started)}
    fallback = next(iter(started.values())).identity if started else {}
    found: dict[str, Group] = {}
    latest: dict[Any, Measured] = {}
    for record in records:
        if isinstance(record, Measured):
            latest[record.cell] = record
    for record in latest.values():
        load = record.cell.load
        identity = started[record.txn].identity if record.txn in started else fallback
        key = repr((sorted(identity.items(), key=str), load.prompts, load.max_tokens, load.rate is not None))
        group = found.setdefault(key, Group(identity, load.prompts, load.max_tokens, load.rate is not None, []))
        result = next((r for r in group.results if r.shape == record.cell.shape and r.load == load), None)
        if result is None:
            result = Result(record.cell.shape, load, [], [])
            group.results.append(result)
        (result.records if record.status == "ok" else result.failed).append(record)
    return sorted(found.values(), key=lambda group: -len(group.results))


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


def ratio(group: Group, a: Shape, b: Shape, load: Load) -> Ratio | None:
    """How many times as fast A is as B under a load; None where one of them has no figures."""
    one, other = group.get(a, load), group.get(b, load)
    return paired_ratio(one.speeds(), other.speeds()) if one and other else None


def ranking(group: Group, load: Load) -> list[Result]:
    """Results with figures, the fastest first by the median of the steady throughput."""
    found = [result for shape in group.shapes if (result := group.get(shape, load)) is not None]
    return sorted(found, key=lambda result: -(result.throughput or Interval(0, 0, 0, 0)).value)


def best(group: Group, load: Load) -> tuple[Result, Ratio | None] | None:
    """The fastest shape, and its paired ratio over the second; None without any figures."""
    ranked = ranking(group, load)
    if not ranked:
        return None
    return ranked[0], ratio(group, ranked[0].shape, ranked[1].shape, load) if len(ranked) > 1 else None


def best_tree(group: Group, load: Load) -> Shape | None:
    """The fastest tree under a load."""
    return next((r.shape for r in ranking(group, load) if r.shape.algorithm == "ddtree"), None)


class Crossover(NamedTuple):
    """Where AR or the chain overtakes the best tree. ``between`` two neighbouring C, both proven; else ``why`` not."""

    against: Shape
    between: tuple[int, int] | None
    why: str


def crossover(group: Group, against: Shape, doubts: str | None) -> Crossover:
    """The C between which ``against`` overtakes the best tree of each C; ``doubts``: why nothing may be claimed."""
    if doubts is not None:
        return Crossover(against, None, doubts)
    if group.open_loop:
        return Crossover(against, None, "requests arrived by a Poisson process: C is no setting there")
    sides: list[tuple[int, Ratio | None]] = []
    for load in group.loads:
        tree = best_tree(group, load)
        sides.append((load.concurrency, ratio(group, tree, against, load) if tree is not None else None))
    known = [(value, found) for value, found in sides if found is not None]
    if not known:
        return Crossover(against, None, "there are no two cells to compare")
    won = [value for value, found in known if found.beats]
    lost = [value for value, found in known if found.loses]
    if won and lost and max(won) < min(lost):
        return Crossover(against, (max(won), min(lost)), "")
    if won and lost:
        return Crossover(against, None, f"no single one: the tree wins at C={won} and loses at C={lost}")
    if won and len(won) == len(known):
        return Crossover(against, None, f"none up to C={max(won)}: the tree is faster throughout")
    if lost and len(lost) == len(known):
        return Crossover(against, None, f"below C={min(lost)}, if anywhere: the tree is slower throughout")
    open_ = [value for value, found in known if not found.beats and not found.loses]
    return Crossover(against, None, f"not resolved: at C={open_} the interval of the ratio holds 1 or is not known")


class Prediction(NamedTuple):
    """``predicted`` = commit length x (AR step time / verify step time); ``rest`` = measured / predicted."""

    commit_length: float
    ar_step_ms: float
    verify_step_ms: float
    predicted: float
    measured: float
    rest: float


def prediction(group: Group, shape: Shape, load: Load) -> Prediction | None:
    """The speed-up that step times explain, beside the measured one; None without AR or the figures."""
    mine, plain = group.get(shape, load), group.get(AR, load)
    if mine is None or plain is None or shape == AR or not mine.accept_length:
        return None
    step, ar_step, over = mine.median("step_ms"), plain.median("step_ms"), ratio(group, shape, AR, load)
    if not step or not ar_step or over is None:
        return None
    predicted = mine.accept_length * ar_step / step
    return Prediction(mine.accept_length, ar_step, step, predicted, over.value, over.value / predicted)


def doubts(records: Sequence[Record], group: Group) -> str | None:
    """Why nothing about a crossover may be claimed from this table; None where it may."""
    if group.identity.get("engine") == "reference":
        return "the reference engine runs in Python on a CPU: the interpreter is what is measured"
    client = next((record for record in records if isinstance(record, Client)), None)
    if client is None:
        return "the load client's own ceiling was not measured"
    for result in group.results:
        ceiling = client.ceilings.get(result.load.concurrency)
        if result.throughput and ceiling and result.throughput.value > SHARE * ceiling[0]:
            return (
                f"{result.shape.name} at C={result.load.concurrency} reaches {result.throughput.value:.0f} tokens/s, more "
                f"than {SHARE:.0%} of the {ceiling[0]:.0f} that the load client takes: the client is measured too"
            )
    return None


def accept_findings(group: Group) -> list[str]:
    """Shapes whose greedy accept length changes with C: prompts that both have are compared, nothing else."""
    found = []
    for shape in group.shapes:
        results = [r for load in group.loads if (r := group.get(shape, load)) is not None and r.accept_length]
        for one, other in zip(results[:1] * len(results), results[1:], strict=False):
            common = _prompts(one) & _prompts(other)
            a, b = _accept(one, common), _accept(other, common)
            if a and b and abs(a / b - 1) > ACCEPT_BOUND:
                found.append(
                    f"{shape.name}: accept length {a:.3f} at C={one.load.concurrency} and {b:.3f} at "
                    f"C={other.load.concurrency} over the same {len(common)} prompts: greedy output must not depend on C"
                )
    return found


def _prompts(result: Result) -> set[int]:
    return {row.prompt for repeat in result.repeats for row in repeat.rows}


def _accept(result: Result, prompts: set[int]) -> float | None:
    rows = [r for repeat in result.repeats for r in repeat.rows if r.prompt in prompts and r.steps_until_eos]
    steps = sum(row.steps_until_eos or 0 for row in rows)
    return sum(row.until_eos - 1 for row in rows) / steps if steps else None


def output_findings(group: Group) -> list[str]:
    """In fp32, shapes whose tokens are not AR's under the same load, and repeats that differ among themselves."""
    found = []
    if group.identity.get("dtype") != "float32":
        return []
    for load in group.loads:
        hashes = {
            shape: {repeat.outputs for repeat in result.repeats}
            for shape in group.shapes
            if (result := group.get(shape, load)) is not None
        }
        for shape, own in hashes.items():
            if len(own) > 1:
                found.append(f"{shape.name} at C={load.concurrency}: its repeats gave different tokens (fp32, greedy)")
            elif AR in hashes and len(hashes[AR]) == 1 and own != hashes[AR]:
                found.append(f"{shape.name} at C={load.concurrency}: its tokens are not AR's (fp32, greedy)")
    return found


class Drift(NamedTuple):
    """The reference cell over the run: (hours since the run began, tokens/s) of each start; the largest change."""

    shape: Shape
    load: Load | None
    points: list[tuple[float, float]]
    change: float
    bound: float

    @property
    def exceeded(self) -> bool:
        """Beyond the stated bound."""
        return abs(self.change) > self.bound


def drift(records: Sequence[Record]) -> Drift:
    """How the reference cell changed from the run's first start to the one that is furthest from it."""
    run = header(records)
    own = [r for r in records if isinstance(r, Measured) and r.status == "ok" and r.cell.shape == run.reference]
    counts: dict[Load, list[Measured]] = {}
    for record in own:
        counts.setdefault(record.cell.load, []).append(record)
    if not counts:
        return Drift(run.reference, None, [], 0.0, run.drift_bound)
    load, chosen = max(counts.items(), key=lambda item: len(item[1]))
    points = [((r.t - run.t) / 3600, statistics.median(x.throughput for x in r.repeats)) for r in chosen]
    change = max((value / points[0][1] - 1 for _, value in points), key=abs)
    return Drift(run.reference, load, points, change, run.drift_bound)


def downtimes(records: Sequence[Record]) -> list[float]:
    """Of every start that took the place of a running service, in seconds."""
    return [record.downtime_s for record in records if isinstance(record, Ended) and record.downtime_s is not None]


REFERENCES = (AR, CHAIN)
