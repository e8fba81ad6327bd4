"""Unified diffs, read and applied strictly: each hunk at the line that it names, each line of it equal to the file's.

``patch`` and ``git apply`` search for a hunk's place; a patch that lands elsewhere than it says changes code that
nobody looked at. Here that is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..errors import Failed

_START = re.compile(rb"^(?:diff --git |--- )", re.MULTILINE)
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n", re.DOTALL)
_INDEX = re.compile(rb"index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: 100(?:644|755))?\n")
_NO_NEWLINE = b"\\ No newline at end of file"
#: What git writes for changes that a series does not make.
_REFUSED = {
    b"old mode": "it changes a file's mode",
    b"new mode": "it changes a file's mode",
    b"new file mode": "it makes a file; new files belong into overlay/",
    b"deleted file mode": "it deletes a file",
    b"similarity index": "it renames or copies a file",
    b"dissimilarity index": "it rewrites a file",
    b"rename ": "it renames a file",
    b"copy ": "it copies a file",
    b"GIT binary patch": "it changes a binary file",
    b"Binary files ": "it changes a binary file",
}


@dataclass(frozen=True)
class Hunk:
    """``before``: lines of the old file before it. ``old`` and ``new``: its lines there, line ends included."""

    number: int
    before: int
    before_new: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """The change of one file that is there before and after. ``path``: relative to site-packages."""

    path: str
    hunks: tuple[Hunk, ...]


def plain_path(name: str) -> bool:
    """Whether a name stays below the directory that it is put into, and means the same on every system."""
    if not name or not name.isprintable() or name.startswith("/") or any(char in name for char in '\\:"'):
        return False
    return ".." not in PurePosixPath(name).parts and str(PurePosixPath(name)) == name != "."


def split_patch(data: bytes) -> tuple[bytes, bytes]:
    """A patch file as its header text and its diff; the diff is empty when there is none."""
    match = _START.search(data)
    return (data[: match.start()], data[match.start() :]) if match else (data, b"")


def parse_diff(data: bytes, origin: str) -> tuple[FileDiff, ...]:
    """All of a diff. Raises Failed naming ``origin``, file and hunk; nothing is skipped."""
    reader = _Reader(_lines(data), origin)
    found: dict[str, FileDiff] = {}
    while reader.left:
        diff = _file(reader)
        if diff.path in found:
            raise Failed(f"{origin}: {diff.path} is changed twice")
        found[diff.path] = diff
    return tuple(found.values())


def _lines(data: bytes) -> list[bytes]:
    """Split at newlines alone: a carriage return or a form feed is content."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


class _Reader:
    """The lines of a diff, one after the other."""

    def __init__(self, lines: list[bytes], origin: str) -> None:
        self._lines = lines
        self._at = 0
        self.origin = origin

    @property
    def left(self) -> bool:
        return self._at < len(self._lines)

    def peek(self) -> bytes:
        return self._lines[self._at] if self.left else b""

    def take(self) -> bytes:
        line = self.peek()
        self._at += 1
        return line

    def fail(self, problem: str) -> Failed:
        return Failed(f"{self.origin}: line {self._at + 1} of the diff: {problem}")


def _file(reader: _Reader) -> FileDiff:
    git = None
    if reader.peek().startswith(b"diff --git "):
        git = reader.take()
        _refuse(reader)
        if reader.peek().startswith(b"index ") and not _INDEX.fullmatch(reader.take()):
            raise reader.fail("an index line of no plain file (a link, or another mode)")
        _refuse(reader)
    old, new = _name(reader, b"--- ", b"a/"), _name(reader, b"+++ ", b"b/")
    if old != new:
        raise reader.fail(f"it renames {old} to {new}")
    if git is not None and git != f"diff --git a/{old} b/{old}\n".encode():
        raise reader.fail("the line 'diff --git' names other files")
    hunks = tuple(_hunks(reader, old))
    if not hunks:
        raise Failed(f"{reader.origin}: {old}: no hunks")
    return FileDiff(old, hunks)


def _refuse(reader: _Reader) -> None:
    for word, why in _REFUSED.items():
        if reader.peek().startswith(word):
            raise reader.fail(why)


def _name(reader: _Reader, mark: bytes, prefix: bytes) -> str:
    _refuse(reader)
    line = reader.peek()
    if line == mark + b"/dev/null\n":
        raise reader.fail(
            "it makes a file; new files belong into overlay/" if mark[:1] == b"-" else "it deletes a file"
        )
    name = line[len(mark) + len(prefix) : -1].decode(errors="replace")
    if not line.startswith(mark + prefix) or not line.endswith(b"\n") or not plain_path(name):
        raise reader.fail(f"expected '{(mark + prefix).decode()}' and a path below site-packages, got {line[:200]!r}")
    reader.take()
    return name


def _hunks(reader: _Reader, path: str) -> Iterator[Hunk]:
    number = end = shift = 0
    while reader.peek().startswith(b"@@"):
        number += 1
        where = f"{reader.origin}: {path}: hunk {number}"
        match = _HUNK.fullmatch(reader.peek())
        if match is None:
            raise Failed(f"{where}: not a hunk's first line: {reader.peek()[:80]!r}")
        reader.take()
        old_start, old_count, new_start, new_count = (1 if group is None else int(group) for group in match.groups())
        old, new = _body(reader, where, old_count, new_count)
        # Of no lines, the number is that of the line before (POSIX, diff -u).
        before, before_new = old_start - (old_count > 0), new_start - (new_count > 0)
        if before < end or (number > 1 and before == end and not old):
            raise Failed(f"{where}: it overlaps the one before, or stands before it")
        if before_new != before + shift:
            raise Failed(f"{where}: its two line numbers do not fit together with the hunks before")
        end, shift = before + old_count, shift + new_count - old_count
        yield Hunk(number, before, before_new, old, new)


def _body(reader: _Reader, where: str, old_count: int, new_count: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        line = reader.take()
        mark, text = line[:1], line[1:]
        if mark not in (b" ", b"-", b"+"):
            raise Failed(f"{where}: expected a line that starts with ' ', '-' or '+', got {line[:80]!r}")
        if reader.peek().rstrip(b"\n") == _NO_NEWLINE:
            reader.take()
            text = text[:-1]
        for side, marks in ((old, b" -"), (new, b" +")):
            if mark in marks:
                side.append(text)
    if len(old) != old_count or len(new) != new_count:
        raise Failed(f"{where}: it has other counts of lines than it says")
    if old == new:
        raise Failed(f"{where}: it changes nothing")
    if any(not line.endswith(b"\n") for side in (old, new) for line in side[:-1]):
        raise Failed(f"{where}: a line without its end is not the last one")
    return tuple(old), tuple(new)


def apply_diff(diff: FileDiff, old: bytes, origin: str) -> bytes:
    """The file after the change. Raises Failed naming patch, file and hunk, and where a searching applier would go."""
    lines = _lines(old)
    parts: list[bytes] = []
    done = 0
    for hunk in diff.hunks:
        there = tuple(lines[hunk.before : hunk.before + len(hunk.old)])
        if there != hunk.old or hunk.before > len(lines):
            raise Failed(f"{origin}: {diff.path}: hunk {hunk.number}: {_misfit(hunk, lines)}")
        parts += lines[done : hunk.before]
        parts += hunk.new
        done = hunk.before + len(hunk.old)
    result = parts + lines[done:]
    if any(not line.endswith(b"\n") for line in result[:-1]):
        raise Failed(f"{origin}: {diff.path}: text after a line that has no end")
    return b"".join(result)


def _misfit(hunk: Hunk, lines: list[bytes]) -> str:
    """Why a hunk does not fit where it says: an offset, or the first line that differs."""
    size = len(hunk.old)
    places = [at for at in range(len(lines) - size + 1) if size and tuple(lines[at : at + size]) == hunk.old]
    if places:
        nearest = min(places, key=lambda at: abs(at - hunk.before))
        return f"would apply with an offset of {nearest - hunk.before:+d} lines; refresh the patch"
    for index, want in enumerate(hunk.old):
        at = hunk.before + index
        have = lines[at] if at < len(lines) else None
        if have != want:
            shown = "the file ends before it" if have is None else f"the file has {have[:120]!r}"
            return f"rejected: line {at + 1} should be {want[:120]!r}, {shown}"
    return f"rejected: it starts after line {hunk.before}, the file has {len(lines)}"
