"""One gzip member whose compression can be changed on the way, and the choice between compressing and not.

On a link that is faster than a core compresses, compressing is what shipping waits for; on any other it is what makes
it fast. Which of the two it is, only trying tells: other work on either machine counts too.
"""

from __future__ import annotations

import struct
import time
import zlib

LEVEL = 4  # results/ship/levels.txt: a tenth less than level 1 for a third more CPU; 6 takes twice that
STORED = 0
#: Bytes of content that one way is tried with: the buffers on the way hold less.
TRIAL = 8 << 20
#: Bytes of content after which the other way is tried again.
AGAIN = 256 << 20


class Packer:
    """Deflate blocks of any level behind each other (RFC 1951), one header and one trailer (RFC 1952)."""

    def __init__(self) -> None:
        self._level: int | None = None
        self._deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc = self._size = 0

    def pack(self, data: bytes, level: int) -> bytes:
        """What can be sent after ``data``; some of it may follow with a later call."""
        before = b""
        if self._level is None:
            before = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
        if level != self._level:
            if self._level is not None:
                before += self._deflate.flush(zlib.Z_FULL_FLUSH)  # to a whole byte, and nothing refers back over it
            self._deflate = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
            self._level = level
        self._crc, self._size = zlib.crc32(data, self._crc), self._size + len(data)
        return before + self._deflate.compress(data)

    def finish(self) -> bytes:
        """The end of the member."""
        return self.pack(b"", LEVEL if self._level is None else self._level) + self._deflate.flush() + self._trailer()

    def _trailer(self) -> bytes:
        return struct.pack("<LL", self._crc, self._size & 0xFFFFFFFF)


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
