"""What may be claimed of a table: which shape is fastest, where it is overtaken, what step times explain. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddtree_ops.sweep.ceiling import SHARE
from ddtree_ops.sweep.grid import AR, Load, Shape
from ddtree_ops.sweep.records import Client, Record
from ddtree_ops.sweep.stats import Interval, Ratio, paired_ratio
from ddtree_ops.sweep.tables import Group, Result


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
                f"{result.shape.name} at C={result.load.concurrency} reaches {result.throughput.value:.0f} tokens/s, "
                f"more than {SHARE:.0%} of the {ceiling[0]:.0f} that the load client takes: the client is measured too"
            )
    return None
