"""The blobs of an upload as pieces: which are still to be sent, over which connection, and as what bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import Failed
from .pack import CHUNK, Pace, Packer


class Piece(NamedTuple):
    """A blob, or what is left of it from ``offset`` on."""

    sha256: str
    offset: int
    size: int


def remaining(wanted: Mapping[str, int], complete: Sequence[str], partial: Mapping[str, int]) -> list[Piece]:
    """What is still to be sent of ``wanted`` (sha256 -> size), begun ones first, then from small to large."""
    done = set(complete)
    pieces = []
    for sha256, size in wanted.items():
        if sha256 not in done:
            held = partial.get(sha256, 0)
            pieces.append(Piece(sha256, held if held <= size else 0, size))
    return sorted(pieces, key=lambda piece: (piece.offset == 0, piece.size, piece.sha256))


def lots_of(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """The pieces in ``count`` lots of about as many bytes, each in the order they were in."""
    lots: list[list[Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=lambda piece: piece.offset - piece.size):
        lightest = loads.index(min(loads))
        lots[lightest].append(piece)
        loads[lightest] += piece.size - piece.offset
    order = {piece: n for n, piece in enumerate(pieces)}
    return [sorted(lot, key=order.__getitem__) for lot in lots]


def stream(
    pieces: Sequence[Piece], blob: Callable[[str], Path], told: Callable[[int], None], pace: Pace | None = None
) -> Iterator[bytes]:
    """The pieces as the host's `receive` reads them, in constant memory; ``told`` of each chunk.

    Raises Failed when a file is not that long.
    """
    packer, pace = Packer(), pace or Pace(may_store=False)
    for data, content in _together(_framed(pieces, blob)):
        yield packer.pack(data, pace.level)
        told(content)
        pace.sent(content)
    yield packer.finish()


def _framed(pieces: Sequence[Piece], blob: Callable[[str], Path]) -> Iterator[tuple[bytes, int]]:
    """The stream in chunks, and how many bytes of each are content. Raises Failed when a file is not that long."""
    for piece in pieces:
        left = piece.size - piece.offset
        head = f"{piece.sha256} {piece.offset} {left}\n".encode()
        path = blob(piece.sha256)
        with path.open("rb", buffering=0) as file:
            if piece.offset:
                file.seek(piece.offset)
            while left and (chunk := file.read(min(CHUNK, left))):
                left -= len(chunk)
                yield head + chunk, len(chunk)
                head = b""
        if left:
            raise Failed(f"{path} is shorter than it was: the cache is damaged", hint="delete it and build again")
        if head:  # an empty file
            yield head, 0


def _together(chunks: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """Small chunks joined: each that is packed and sent costs as much as a large one."""
    waiting: list[bytes] = []
    size = content = 0
    for data, inner in chunks:
        waiting.append(data)
        size, content = size + len(data), content + inner
        if size >= CHUNK:
            yield b"".join(waiting), content
            waiting, size, content = [], 0, 0
    if waiting:
        yield b"".join(waiting), content
