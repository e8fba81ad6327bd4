"""Blocks of a Markdown file that a command writes, between two comments that name it."""

from __future__ import annotations

from pathlib import Path


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands in the file's block of this name. Raises ValueError where there is none."""
    begin, end = marks(name)
    head, found, rest = path.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path.name} has no block {begin} ... {end}")
    path.write_text(f"{head}{begin}\n{text}{end}{tail}")


def block(path: Path, name: str) -> str:
    """What stands in it."""
    begin, end = marks(name)
    return path.read_text().partition(begin)[2].partition(end)[0].removeprefix("\n")


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
