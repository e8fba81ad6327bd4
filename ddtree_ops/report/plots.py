"""Which charts a table of cells gives. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddtree_ops.report.blocks import Figure
from ddtree_ops.report.svg import Point, Series, bars, diagonal, lines
from ddtree_ops.sweep.claims import Crossover, prediction
from ddtree_ops.sweep.grid import AR, Load, Shape
from ddtree_ops.sweep.tables import Group

LONGEST_COMMIT = 16


def figures(group: Group, crossings: list[Crossover], prefix: str) -> list[Figure]:
    """All charts for which the table has figures; ``prefix`` keeps the names of several tables apart."""
    loads = [load for load in group.loads if any(group.get(shape, load) for shape in group.shapes)]
    if not loads:
        return []
    found = [*_by_concurrency(group, loads, crossings), *_by_budget(group, loads)]
    ends = dict.fromkeys((loads[0], loads[-1]))
    for load in ends:
        found += [*_accept_over_time(group, load), *_commits(group, load)]
    found += _against_limit(group, loads)
    return [figure._replace(name=prefix + re.sub(r"[^a-z0-9-]+", "-", figure.name)) for figure in found]


def _point(group: Group, shape: Shape, load: Load, x: float) -> Point | None:
    result = group.get(shape, load)
    interval = result.throughput if result else None
    return None if interval is None else Point(x, interval.value, interval.low, interval.high)


def _by_concurrency(group: Group, loads: list[Load], crossings: list[Crossover]) -> Iterator[Figure]:
    if group.open_loop or len(loads) < 2:
        return
    series = []
    for shape in group.shapes:
        points = [p for load in loads if (p := _point(group, shape, load, load.concurrency)) is not None]
        if points:
            series.append(Series(shape.name, points))
    band = next((crossing for crossing in crossings if crossing.between is not None), None)
    yield Figure(
        "throughput-by-c",
        "Tokens/s by C, with the interval of the median"
        + (f"; shaded: where {band.against.name} overtakes the best tree" if band else ""),
        lines(
            series,
            x_label="C, requests in flight",
            y_label="tokens/s",
            x_ticks=[load.concurrency for load in loads],
            x_log=True,
            band=None if band is None else band.between,
            band_label="crossover" if band else "",
        ),
    )


def _by_budget(group: Group, loads: list[Load]) -> Iterator[Figure]:
    trees = [shape for shape in group.shapes if shape.algorithm == "ddtree"]
    if len({shape.budget for shape in trees}) < 2:
        return
    for load in dict.fromkeys((loads[0], loads[-1])):
        series = []
        for topk in sorted({shape.topk or 0 for shape in trees}):
            chosen = [shape for shape in trees if shape.topk == topk]
            points = [p for s in chosen if (p := _point(group, s, load, s.budget or 0)) is not None]
            if points:
                series.append(Series(f"topk {topk}", points))
        budgets = sorted({shape.budget or 0 for shape in trees})
        for shape in (shape for shape in group.shapes if shape.algorithm != "ddtree"):
            if (level := _point(group, shape, load, 0)) is not None:
                ends = [level._replace(x=float(budget)) for budget in (budgets[0], budgets[-1])]
                series.append(Series(shape.name, ends))
        if series:
            yield Figure(
                f"throughput-by-budget-{load_slug(load)}",
                f"Tokens/s by budget at {load.name}; AR and chain as levels",
                lines(series, x_label="budget, nodes verified a step", y_label="tokens/s", x_ticks=budgets),
            )


def _accept_over_time(group: Group, load: Load) -> Iterator[Figure]:
    series = []
    for shape in group.shapes:
        result = group.get(shape, load)
        if result is not None and (points := result.repeats[0].accept_over_time):
            series.append(Series(shape.name, [Point(t, value, value, value) for t, value in points]))
    if series:
        yield Figure(
            f"accept-length-over-time-{load_slug(load)}",
            f"Accept length over the steady window of the first repeat at {load.name}",
            lines(series, x_label="seconds", y_label="tokens a step"),
        )


def _commits(group: Group, load: Load) -> Iterator[Figure]:
    counts: dict[str, dict[int, int]] = {}
    for shape in group.shapes:
        result = group.get(shape, load)
        total: dict[int, int] = {}
        for repeat in result.repeats if result else []:
            for length, count in repeat.commits.items():
                total[length] = total.get(length, 0) + count
        if total:
            counts[shape.name] = total
    if counts:
        longest = min(LONGEST_COMMIT, max(length for total in counts.values() for length in total))
        rows = [
            (str(length), [100 * total.get(length, 0) / sum(total.values()) for total in counts.values()])
            for length in range(1, longest + 1)
        ]
        yield Figure(
            f"commit-lengths-{load_slug(load)}",
            f"How many tokens a verify step commits at {load.name}",
            bars(list(counts), rows, x_label="tokens committed", y_label="% of steps"),
        )


def _against_limit(group: Group, loads: list[Load]) -> Iterator[Figure]:
    points = [
        (f"{shape.name} C={load.concurrency}", found.predicted, found.measured)
        for load in loads
        for shape in group.shapes
        if shape != AR and (found := prediction(group, shape, load)) is not None
    ]
    if points:
        yield Figure(
            "speed-up-against-limit",
            "Measured speed-up over AR against commit length x (AR step time / verify step time); dashed: all of it",
            diagonal(points[:18], x_label="predicted", y_label="measured"),
        )


def load_slug(load: Load) -> str:
    """A load in a file's name."""
    return f"c{load.concurrency}" if load.rate is None else f"rate-{load.rate:g}"
