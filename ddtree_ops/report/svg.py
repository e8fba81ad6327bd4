"""Charts as SVG text: lines with intervals, grouped bars, points against the diagonal. Pure; all sizes are fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 18, 48
# Okabe and Ito's colours, told apart by most eyes; beyond eight series the dashes differ.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6a00")
DASHES = ("", "6 3", "2 3")


class Point(NamedTuple):
    """``low`` and ``high`` bound ``y``; equal to it where there is no interval."""

    x: float
    y: float
    low: float
    high: float


class Series(NamedTuple):
    """A named line."""

    name: str
    points: Sequence[Point]


class Axes(NamedTuple):
    """Data to pixels. ``x_log``: base 2."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_log: bool

    def x(self, value: float) -> float:
        low, high = (math.log2(v) for v in self.x_range) if self.x_log else self.x_range
        at = math.log2(value) if self.x_log else value
        return LEFT + (at - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float] | None = None,
    x_log: bool = False,
    band: tuple[float, float] | None = None,
    band_label: str = "",
) -> str:
    """A chart of lines from y = 0 on. ``band``: a shaded stretch of x."""
    points = [point for one in series for point in one.points]
    xs = [point.x for point in points]
    ticks = list(x_ticks) if x_ticks is not None else nice(min(xs), max(xs))
    spread = (min([*xs, *ticks]), max([*xs, *ticks]))
    if spread[0] == spread[1]:
        spread = (spread[0] / 2, spread[0] * 2) if x_log else (spread[0] - 1, spread[0] + 1)
    heights = nice(0, max(max(point.high for point in points), 1e-9))
    axes = Axes(spread, (0, heights[-1]), x_log)
    parts = frame(axes, ticks, heights, x_label, y_label)
    if band is not None:
        a, b = axes.x(band[0]), axes.x(band[1])
        parts.append(
            f'<rect x="{a:.1f}" y="{TOP}" width="{b - a:.1f}" height="{HEIGHT - TOP - BOTTOM}" fill="#e69f00" '
            f'fill-opacity="0.15"/>'
        )
        parts.append(text((a + b) / 2, TOP + 14, band_label, anchor="middle"))
    for index, one in enumerate(series):
        stroke = f'stroke="{COLOURS[index % len(COLOURS)]}"'
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        path = " ".join(f"{axes.x(p.x):.1f},{axes.y(p.y):.1f}" for p in one.points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline points="{path}" fill="none" {stroke} stroke-width="2"{dashed}/>')
        for p in one.points:
            if p.high > p.low:
                x = axes.x(p.x)
                parts.append(f'<path d="M{x:.1f} {axes.y(p.low):.1f}V{axes.y(p.high):.1f}" {stroke}/>')
            parts.append(
                f'<circle cx="{axes.x(p.x):.1f}" cy="{axes.y(p.y):.1f}" r="3" fill="{COLOURS[index % len(COLOURS)]}">'
                f"<title>{escape(one.name)}: {p.y:.4g}</title></circle>"
            )
    return whole([*parts, *legend([one.name for one in series])])


def bars(names: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], *, x_label: str, y_label: str) -> str:
    """Grouped bars: for each group one bar a name."""
    heights = nice(0, max([value for _, values in groups for value in values] or [1]))
    axes = Axes((0, len(groups)), (0, heights[-1]), False)
    parts = frame(axes, [], heights, x_label, y_label)
    for place, (label, values) in enumerate(groups):
        slot = axes.x(1) - axes.x(0)
        each = slot * 0.8 / max(1, len(names))
        for index, value in enumerate(values):
            x, y = axes.x(place) + slot * 0.1 + index * each, axes.y(value)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{each:.1f}" height="{axes.y(0) - y:.1f}" '
                f'fill="{COLOURS[index % len(COLOURS)]}"><title>{escape(names[index])}, {escape(label)}: {value:.3g}'
                "</title></rect>"
            )
        parts.append(text(axes.x(place + 0.5), HEIGHT - BOTTOM + 18, label, anchor="middle"))
    return whole([*parts, *legend(names)])


def diagonal(points: Sequence[tuple[str, float, float]], *, x_label: str, y_label: str) -> str:
    """Named points against y = x."""
    ticks = nice(0, max([max(x, y) for _, x, y in points] or [1]))
    axes = Axes((0, ticks[-1]), (0, ticks[-1]), False)
    parts = frame(axes, ticks, ticks, x_label, y_label)
    end = ticks[-1]
    parts.append(
        f'<path d="M{axes.x(0):.1f} {axes.y(0):.1f}L{axes.x(end):.1f} {axes.y(end):.1f}" stroke="#5b6570" '
        'stroke-dasharray="4 4" fill="none"/>'
    )
    for index, (name, x, y) in enumerate(points):
        parts.append(
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="5" fill="{COLOURS[index % len(COLOURS)]}">'
            f"<title>{escape(name)}: {x:.3g}, {y:.3g}</title></circle>"
        )
    return whole([*parts, *legend([name for name, _, _ in points])])


def frame(axes: Axes, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> list[str]:
    """Grid, ticks and the axes' names."""
    parts = []
    for value in y_ticks:
        y = axes.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d5dae0"/>')
        parts.append(text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for value in x_ticks:
        parts.append(text(axes.x(value), HEIGHT - BOTTOM + 18, f"{value:g}", anchor="middle"))
    parts.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#1b1f24"/>')
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">'
        f"{escape(y_label)}</text>"
    )
    return parts


def legend(names: Sequence[str]) -> list[str]:
    """Names beside their colours, at the right."""
    found = []
    for index, name in enumerate(names[:18]):
        y = TOP + 10 + index * 18
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        x = WIDTH - RIGHT + 12
        found.append(f'<path d="M{x} {y}h18" stroke="{colour}" stroke-width="3"{dashed}/>')
        found.append(text(x + 24, y + 4, name if len(name) <= 17 else name[:16] + "…"))
    return found


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def whole(parts: Sequence[str]) -> str:
    """The SVG element, standing on its own."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#1b1f24">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>' + "".join(parts) + "</svg>"
    )


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """Round ticks that hold ``low`` and ``high``."""
    span = (high - low) or 1.0
    raw = span / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * index, 10) for index in range(first, last + 1)]
