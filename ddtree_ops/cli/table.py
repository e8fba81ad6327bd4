"""A plain table as rich draws it, without importing rich: that takes longer than asking ten hosts takes to begin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

HEAD, LINE, BOLD, OFF = "┃", "│", "\x1b[1m", "\x1b[0m"


def draw(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], *, bold: bool) -> str | None:
    """The lines of the table. ``right``: which columns are right-aligned; ``bold``: whether the head is.

    None for what needs rich: a text that is not plain ASCII on one line, a table wider than the screen.
    """
    cells = [columns, *rows]
    if not all(text.isascii() and text.isprintable() for row in cells for text in row):
        return None
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    if sum(widths) + 3 * len(widths) + 1 > screen_width():
        return None

    def line(row: Sequence[str], edge: str, before: str = "", after: str = "") -> str:
        inside = (
            f"{before} {text.rjust(width) if flush else text.ljust(width)} {after}"
            for text, width, flush in zip(row, widths, right, strict=True)
        )
        return edge + edge.join(inside) + edge

    def rule(left: str, middle: str, cross: str, end: str) -> str:
        return left + cross.join(middle * (width + 2) for width in widths) + end

    head = line(columns, HEAD, BOLD, OFF) if bold else line(columns, HEAD)
    body = [line(row, LINE) for row in rows]
    return "\n".join([rule("┏", "━", "┳", "┓"), head, rule("┡", "━", "╇", "┩"), *body, rule("└", "─", "┴", "┘")])


def blocks(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str | None:
    """The rows one below the other, a line for each column that has something to say.

    None where the screen is wide enough for a table that breaks no word.
    """
    longest = [
        max((len(word) for row in (columns, *rows) for word in row[index].split()), default=0)
        for index in range(len(columns))
    ]
    if sum(longest) + 3 * len(columns) + 1 <= screen_width():
        return None
    width = max(map(len, columns))
    told = [
        "\n".join(f"{name.rjust(width)}  {cell}" for name, cell in zip(columns, row, strict=True) if cell)
        for row in rows
    ]
    return "\n\n".join(told)


def screen_width() -> int:
    """Columns of the terminal, as rich finds them: $COLUMNS, the first standard stream that is one, else 80."""
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said):
        return int(said)
    if os.environ.get("TERM") not in ("dumb", "unknown"):
        for stream in range(3):
            with contextlib.suppress(OSError):
                return os.get_terminal_size(stream).columns or 80
    return 80
