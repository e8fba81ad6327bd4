"""Intervals for medians and for paired ratios. Pure, deterministic, no resampling.

The paired ratio of A to B: both answered the same prompts, so a prompt's difficulty cancels; every start of the
service is a cluster of its own, since two starts of one configuration differ by more than two passes of one start.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """``low`` <= ``value`` <= ``high``; ``coverage`` is the probability with which such intervals hold the truth."""

    value: float
    low: float
    high: float
    coverage: float


class Ratio(NamedTuple):
    """How many times as fast A is as B. ``proven`` False: fewer than two starts on a side, so no interval."""

    value: float
    low: float
    high: float
    starts: tuple[int, int]
    prompts: int
    proven: bool

    @property
    def beats(self) -> bool:
        """A beats B: the interval lies above 1."""
        return self.proven and self.low > 1

    @property
    def loses(self) -> bool:
        """B beats A."""
        return self.proven and self.high < 1


def median_interval(values: Sequence[float]) -> Interval:
    """The median with an order-statistics interval: distribution-free, of at least CONFIDENCE where there are six
    values or more, else from smallest to largest with the coverage that has (three values: 0.75).
    """
    ordered, n = sorted(values), len(values)
    if not n:
        raise ValueError("no values")
    best = (0, _coverage(n, 0))
    for skip in range(1, n // 2):
        if _coverage(n, skip) >= CONFIDENCE:
            best = (skip, _coverage(n, skip))
    skip, coverage = best
    return Interval(statistics.median(ordered), ordered[skip], ordered[n - 1 - skip], coverage)


def _coverage(n: int, skip: int) -> float:
    """That the median lies between the ``skip``-th smallest and largest of n values (0: the extremes)."""
    tail = float(sum(math.comb(n, k) for k in range(skip + 1))) / float(2**n)
    return max(0.0, 1 - 2 * tail)


Speeds = Mapping[str, Mapping[int, float]]
"""Start -> prompt -> tokens/s of that prompt's requests there."""


def paired_ratio(a: Speeds, b: Speeds) -> Ratio:
    """Geometric mean over prompts of A's speed over B's, with a Student interval on the logarithm.

    Model: log speed = prompt + configuration + start + noise. The starts' variance is pooled over both sides (degrees
    of freedom: starts - 2), the prompts' own is that of the difference; each gives a half width, and those are added
    in quadrature. (One width by Satterthwaite's formula is too narrow with two starts a side.) Raises ValueError
    where they have no prompt in common.
    """
    prompts = sorted(set.intersection(*(set(rows) for rows in (*a.values(), *b.values())))) if a and b else []
    if not prompts:
        raise ValueError("no prompt in common")
    means = [{start: _mean_log(rows, prompts) for start, rows in side.items()} for side in (a, b)]
    log: float = statistics.fmean(means[0].values()) - statistics.fmean(means[1].values())
    counts = (len(a), len(b))
    per_prompt = [
        statistics.fmean(math.log(rows[p]) for rows in a.values())
        - statistics.fmean(math.log(rows[p]) for rows in b.values())
        for p in prompts
    ]
    freedom = sum(counts) - 2
    if min(counts) < 2:
        return Ratio(math.exp(log), math.nan, math.nan, counts, len(prompts), False)
    between = sum(_squares(side.values()) for side in means) / freedom
    of_starts = between * (1 / counts[0] + 1 / counts[1])
    of_prompts = statistics.variance(per_prompt) / len(prompts) if len(prompts) > 1 else 0.0
    share = 1 - (1 - CONFIDENCE) / 2
    half = math.sqrt(
        student_quantile(share, freedom) ** 2 * of_starts
        + (student_quantile(share, len(prompts) - 1) ** 2 * of_prompts if of_prompts else 0.0)
    )
    return Ratio(math.exp(log), math.exp(log - half), math.exp(log + half), counts, len(prompts), True)


def _mean_log(rows: Mapping[int, float], prompts: Sequence[int]) -> float:
    return statistics.fmean(math.log(rows[prompt]) for prompt in prompts)


def _squares(values: Iterable[float]) -> float:
    found = list(values)
    mean = statistics.fmean(found)
    return math.fsum((value - mean) ** 2 for value in found)


def student_quantile(share: float, freedom: float) -> float:
    """The quantile of Student's t for ``share`` >= 0.5 and any ``freedom`` > 0, by bisection of its distribution."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, freedom: float) -> float:
    """P(T <= t) of Student's t for t >= 0, through the regularised incomplete beta function."""
    return 1 - 0.5 * _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta I_x(a, b) by its continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return max(0.0, min(1.0, x))
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d, tiny = 1.0, 1 - (a + b) * x / (a + 1), 1e-300
    d = 1 / (d or tiny)
    h = d
    for m in range(1, 400):
        for top in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + top * d) or tiny)
            c = (1 + top / c) or tiny
            h *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return front * h / a
