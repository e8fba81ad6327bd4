"""Figures as words: numbers with what they are worth, ratios with their claim. Pure."""

from __future__ import annotations

import math
import time

from ddtree_ops.sweep.records import Percentiles
from ddtree_ops.sweep.stats import Interval, Ratio


def number(value: float | None, digits: int = 1) -> str:
    """Fixed decimals; ``-`` where nobody told it."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def interval(found: Interval | None) -> str:
    """``150.2 (148.9 to 151.0)``."""
    if found is None:
        return "-"
    return f"{found.value:.1f} ({found.low:.1f} to {found.high:.1f})"


def ratio(found: Ratio | None) -> str:
    """``1.53 (1.50 to 1.56)``, or the value with why it has no interval."""
    if found is None:
        return "-"
    if not found.proven:
        return f"{found.value:.2f} (starts {found.starts[0]} and {found.starts[1]}: no interval)"
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def claim(a: str, b: str, found: Ratio) -> str:
    """What the ratio allows to be said of A and B."""
    if not found.proven:
        few = f"{found.starts[0]} and {found.starts[1]} starts"
        return f"{a} over {b}: {found.value:.2f}, not proven ({few}; two of each are needed)"
    verb = "beats" if found.beats else "loses to" if found.loses else "is not told apart from"
    return f"{a} {verb} {b}: {ratio(found)}, {found.prompts} prompts, {found.starts[0]} and {found.starts[1]} starts"


def percentiles(found: Percentiles | None) -> str:
    """``p50 / p90 / p99``."""
    return "-" if found is None else f"{found.p50:.1f} / {found.p90:.1f} / {found.p99:.1f}"


def moment(t: float) -> str:
    """UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(t))


def listed(values: list[str]) -> str:
    """``a, b and c``."""
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + f" and {values[-1]}"
