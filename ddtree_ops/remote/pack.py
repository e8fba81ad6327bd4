"""What goes over the link: bytes in segments, compressed or as they are, and the choice between the two.

On a link that is faster than a core compresses, compressing is what shipping waits for; on any other it is what makes
it fast. Which of the two it is, only trying tells: other work on either machine counts too.
"""

from __future__ import annotations

import time
import zlib

CHUNK = 1 << 18  # bytes that are packed and sent at once
LEVEL = 4  # results/ship/levels.txt: a tenth less than level 1 for a third more CPU; 6 takes twice that
STORED = 0
#: Bytes of content that one way is tried with: the buffers on the way hold less.
TRIAL = 8 << 20
#: Bytes of content after which the other way is tried again.
AGAIN = 256 << 20


class Packer:
    """Segments: a line ``deflated <n>`` or ``stored <n>``, and n bytes. The deflated ones behind each other are one
    stream of RFC 1951; there is no checksum, as each blob has its hash and ssh its own.
    """

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._waits = False

    def pack(self, data: bytes, level: int) -> bytes:
        """What can be sent after ``data``; some of it may follow with a later call."""
        if level == STORED:
            return self._flushed() + b"stored %d\n" % len(data) + data
        self._waits = True
        return _deflated(self._deflate.compress(data))

    def finish(self) -> bytes:
        return self._flushed() + b"end\n"

    def _flushed(self) -> bytes:
        if not self._waits:
            return b""
        self._waits = False
        return _deflated(self._deflate.flush(zlib.Z_SYNC_FLUSH))


def _deflated(data: bytes) -> bytes:
    return b"deflated %d\n" % len(data) + data if data else b""


class Pace:
    """Which level is the faster one: both are tried, then the better one is kept, and the other tried now and then."""

    def __init__(self, *, may_store: bool) -> None:
        """Without ``may_store`` it is always `LEVEL`: on a slow link even a trial would send more than it should."""
        self._may_store = may_store
        self._spent = {LEVEL: 0.0, STORED: 0.0}
        self._done = {LEVEL: 0, STORED: 0}
        self._level, self._until, self._total = LEVEL, TRIAL, 0
        self._since = time.monotonic()

    @property
    def level(self) -> int:
        return self._level

    def sent(self, size: int) -> None:
        """So many bytes of content are compressed and written; chooses for what comes next."""
        now = time.monotonic()
        self._spent[self._level] += now - self._since
        self._done[self._level] += size
        self._since, self._total = now, self._total + size
        if self._may_store and self._total >= self._until:
            self._choose()

    def _choose(self) -> None:
        other = STORED if self._level == LEVEL else LEVEL
        if not self._done[other]:
            self._level, self._until = other, self._total + TRIAL
            return
        best = min((LEVEL, STORED), key=lambda level: self._spent[level] / self._done[level])
        self._level, self._until = best, self._total + AGAIN
        # The way not taken is tried anew then: contents differ, and so does what else the machines do.
        self._spent, self._done = {LEVEL: 0.0, STORED: 0.0}, {LEVEL: 0, STORED: 0}
