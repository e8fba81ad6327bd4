"""Staging: where blobs arrive as the SSH user, before root takes what has the right hash into its store.

The stream is segments: a line ``deflated <n>`` or ``stored <n>`` and n bytes, at the end the line ``end``; the
deflated ones behind each other are one stream of RFC 1951. What they hold is, for each blob, a line
``<sha256> <offset> <length>`` and that many bytes: a blob that arrived in part goes on at its ``offset``.

A large blob becomes a file named by its hash, ``<sha256>.part`` until it is whole. Small ones go behind each other
into a pack, as making a file costs more than what is in it: ``pack.<random>`` is, for each, a line
``<sha256> <length>`` and its bytes. What is cut off at a pack's end was never there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import stat
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from .base import JSON, SHA256, HostError, absolute, named, pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Any

IDLE_S = 12.0  # a sender whose link is that long silent is gone: its own end gives up after 10 s
SETTLE_PARTS_S = 3.0  # what a broken connection still had in its pipes has arrived by then
CHUNK = 1 << 18
PACKED = 1 << 16  # bytes; a larger blob gets a file of its own
PACK = pattern(r"pack\.[0-9a-f]{8}")
_SEGMENT = pattern(rb"(deflated|stored) ([0-9]{1,12})")
_ENTRY = pattern(rb"([0-9a-f]{64}) ([0-9]{1,5})\n")


def own_staging(path: Path, create: bool = False) -> int:
    """A descriptor of a staging directory that belongs to the SSH user and to nobody's symlink."""
    if create:
        with contextlib.suppress(FileExistsError):  # the receiver of another connection was faster
            path.mkdir(0o700, parents=True)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:  # what open(2) says of a link, too
        raise HostError("refused", f"{path} is not a directory of its own; remove it") from None
    owner, user = os.fstat(fd).st_uid, int(os.environ.get("SUDO_UID") or os.geteuid())
    if owner != user:
        os.close(fd)
        raise HostError("refused", f"{path} belongs to uid {owner}, not to {user}")
    return fd


def staged(_: Any, request: JSON) -> JSON:
    """What the staging directory has: {"complete": [sha256], "partial": {sha256: bytes}}."""
    return staging_facts(absolute(request.get("staging"), "staging"))


def staging_facts(path: Path, wanted: Collection[str] | None = None) -> JSON:
    """As `staged`, of what is wanted. Waits for the receiver that a cut link left behind; locked when one is still
    being fed.
    """
    complete: list[str] = []
    partial: dict[str, int] = {}
    try:
        fd = own_staging(path)
    except FileNotFoundError:
        return {"complete": complete, "partial": partial}
    try:
        with os.scandir(fd) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        for name in names:
            if PACK.fullmatch(name):
                settled_size(name, fd)
                found = (sha for sha, _, _ in entries_of(own_file(name, fd)))
                complete += [sha for sha in found if wanted is None or sha in wanted]
                continue
            sha, _, suffix = name.partition(".")
            if wanted is not None and sha not in wanted:
                continue
            if not SHA256.fullmatch(sha) or suffix not in ("", "part"):
                continue
            if not suffix:
                complete.append(sha)
                continue
            try:
                partial[sha] = settled_size(name, fd)
            except FileNotFoundError:  # it became whole meanwhile
                complete.append(sha)
    finally:
        os.close(fd)
    return {"complete": complete, "partial": partial}


def own_file(name: str, directory: int) -> int:
    """A descriptor of a plain file of the directory's owner, through no link. Raises FileNotFoundError."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise HostError("refused", f"{name} in staging: {error.strerror}") from error
    status, owner = os.fstat(fd), os.fstat(directory).st_uid
    if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
        os.close(fd)
        raise HostError("refused", f"{name} in staging is not a regular file of uid {owner}")
    return fd


def settled_size(name: str, directory: int) -> int:
    """Bytes of a partial blob once nobody writes to it. Raises FileNotFoundError when it was completed meanwhile."""
    part = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        began, settled = time.monotonic(), -1
        while True:
            size = os.fstat(part).st_size
            try:
                fcntl.flock(part, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited > SETTLE_PARTS_S:
                    settled = size if settled < 0 else settled
                if settled not in (-1, size) or waited > IDLE_S + 2 * SETTLE_PARTS_S:
                    raise HostError("locked", "another upload to this host is under way; wait for it") from None
                time.sleep(0.1)
                continue
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            return os.fstat(part).st_size
    finally:
        os.close(part)


class Stream:
    """The stream as it comes: what arrived can be read at once. Memory is bounded whatever it expands to."""

    def __init__(self, fd: int) -> None:
        self._fd, self._inflate = fd, zlib.decompressobj(-zlib.MAX_WBITS)
        self._raw = b""  # what came and is not yet looked at
        self._left, self._stored, self._ended = 0, False, False  # bytes of the segment that are still to come
        self._ready, self._at = b"", 0  # what was in segments, and how much of it is taken

    def _filled(self) -> bool:
        """Whether there is a byte to take; False at the good end. Raises cut, or failed when it is damaged."""
        while self._at >= len(self._ready):
            if self._inflate.unconsumed_tail:
                self._inflated(self._inflate.unconsumed_tail)
            elif self._left:
                data = self._raw[: self._left] or self._came(min(self._left, CHUNK))
                self._raw, self._left = self._raw[len(data) :], self._left - len(data)
                if self._stored:
                    self._ready, self._at = data, 0
                else:
                    self._inflated(data)
            elif self._ended or not self._next_segment():
                return False
        return True

    def _inflated(self, data: bytes) -> None:
        try:
            self._ready, self._at = self._inflate.decompress(data, 1 << 20), 0
        except zlib.error as error:
            raise HostError("failed", f"the stream is damaged: {error}") from error

    def _next_segment(self) -> bool:
        while b"\n" not in self._raw:
            if len(self._raw) > 40:
                raise HostError("failed", "the stream is damaged: no segment begins where one should")
            self._raw += self._came(CHUNK)
        line, _, self._raw = self._raw.partition(b"\n")
        if line == b"end":
            self._ended = True
            return False
        found = _SEGMENT.fullmatch(line)
        if not found:
            raise HostError("failed", "the stream is damaged: no segment begins where one should")
        self._stored, self._left = found[1] == b"stored", int(found[2])
        return True

    def _came(self, size: int) -> bytes:
        if not select.select([self._fd], [], [], IDLE_S)[0]:
            raise HostError("cut", f"no byte came for {IDLE_S:g} s: the link is taken for dead")
        data = os.read(self._fd, size)
        if not data:
            raise HostError("cut", "the stream was cut")
        return data

    def _take(self, end: int) -> bytes:
        found = self._ready[self._at : end]
        self._at += len(found)
        return found

    def some(self, limit: int) -> bytes:
        """At least one byte and at most ``limit``; b"" at the good end. Raises cut, or failed when it is damaged."""
        return self._take(self._at + limit) if self._filled() else b""

    def exactly(self, size: int) -> bytes:
        """So many bytes. Raises what `some` does, and refused at an early end."""
        found = self.some(size) if size else b""
        while len(found) < size:
            more = self.some(size - len(found))
            if not more:
                raise HostError("refused", "the stream ends inside a blob")
            found += more
        return found

    def line(self) -> bytes:
        """Up to a newline, without it; b"" at the end. A line that does not end is given up after 200 bytes."""
        line = b""
        while not line.endswith(b"\n") and len(line) <= 200 and self._filled():
            last = self._at + 201 - len(line)
            line += self._take(self._ready.find(b"\n", self._at, last) + 1 or last)
        return line.rstrip(b"\n")


class Pack:
    """The pack that one receiver fills, made when there is something to write, locked until it is closed."""

    def __init__(self, directory: int) -> None:
        self._directory, self._name, self._fd = directory, f"pack.{os.urandom(4).hex()}", -1
        self._waiting: list[bytes] = []
        self._size = 0

    def add(self, sha: str, content: bytes) -> None:
        """A blob whose hash is right. Raises OSError: nothing of the pack is kept."""
        self._waiting += [f"{sha} {len(content)}\n".encode(), content]
        self._size += len(content)
        if self._size >= CHUNK:
            self._write()

    def _write(self) -> None:
        left = memoryview(b"".join(self._waiting))
        self._waiting, self._size = [], 0
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._fd = os.open(self._name, flags, 0o600, dir_fd=self._directory)
            hold(self._fd)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:  # a full disk: what we took of it, we give back
            os.unlink(self._name, dir_fd=self._directory)
            raise

    def close(self) -> None:
        try:
            if self._waiting:
                self._write()
        finally:
            if self._fd >= 0:
                os.close(self._fd)


def entries_of(pack: int) -> Iterator[tuple[str, int, int]]:
    """(sha256, offset, length) of each whole blob; the descriptor is closed at the end."""
    with os.fdopen(pack, "rb") as file:
        size = os.fstat(pack).st_size
        while entry := _ENTRY.fullmatch(file.readline(80)):
            at, length = file.tell(), int(entry[2])
            if at + length > size:
                return
            yield entry[1].decode(), at, length
            file.seek(length, os.SEEK_CUR)


class Packs:
    """What the packs of a staging directory hold, as root sees it: nothing of it is believed before it is hashed."""

    def __init__(self, directory: int, wanted: Collection[str]) -> None:
        """Only what is wanted is kept in memory: a pack is as long as its owner likes."""
        self._directory = directory
        self._files: dict[str, int] = {}
        self._places: dict[str, tuple[str, int, int]] = {}
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if PACK.fullmatch(entry.name))
        for name in names:
            self._files[name] = own_file(name, directory)
            for sha, at, length in entries_of(os.dup(self._files[name])):
                if sha in wanted:
                    self._places[sha] = (name, at, length)

    def content(self, sha: str) -> bytes | None:
        """What a pack has under that name; None when none has it."""
        if sha not in self._places:
            return None
        name, at, length = self._places[sha]
        return os.pread(self._files[name], length, at)

    def drop(self, sha: str) -> None:
        """Remove the pack that has it, if one has."""
        if sha in self._places:
            self._unlink(self._places[sha][0])

    def clear(self, done: Callable[[str], bool]) -> None:
        """Remove each pack of which nothing is wanted any more; not one that is being written."""
        for name, fd in self._files.items():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.lseek(fd, 0, os.SEEK_SET)
                if all(done(sha) for sha, _, _ in entries_of(os.dup(fd))):
                    self._unlink(name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)


def receive(staging: Path, fd: int) -> JSON:
    """Write the stream's blobs; each gets its name once its hash is right. ``wrong``: those that had another."""
    directory, stream, count = own_staging(staging, create=True), Stream(fd), 0
    pack, wrong = Pack(directory), []
    try:
        while head := stream.line():
            words = head.decode("ascii", "replace").split(" ")
            if len(words) != 3 or not (words[1].isdigit() and words[2].isdigit()):
                raise HostError("refused", "the stream is not one of blobs")
            sha, offset, length = named(SHA256, words[0], "blob"), int(words[1]), int(words[2])
            if offset or length > PACKED:
                right = receive_blob(stream, directory, sha, offset, length)
            elif right := hashlib.sha256(content := stream.exactly(length)).hexdigest() == sha:
                pack.add(sha, content)
            if right:
                count += 1
            else:
                wrong.append(sha)
    finally:
        try:
            pack.close()
        finally:
            os.close(directory)
    return {"received": count, "wrong": wrong}


def receive_blob(stream: Stream, directory: int, sha: str, offset: int, length: int) -> bool:
    """One blob from its ``offset`` on; False when it is then not what its name says: nothing of it is kept."""
    name, state = f"{sha}.part", hashlib.sha256()
    part = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=directory)
    with os.fdopen(part, "rb+", buffering=0) as file:
        status = os.fstat(part)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise HostError("refused", f"{name} in staging is not a plain file of ours; remove it")
        hold(part)
        os.ftruncate(part, min(offset, status.st_size))
        while chunk := file.read(CHUNK):
            state.update(chunk)
        left = length
        try:
            while left:
                chunk = stream.some(min(left, CHUNK))
                if not chunk:
                    raise HostError("refused", "the stream ends inside a blob")
                state.update(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) or 0 :]
                left -= len(chunk)
        except OSError:  # a full disk: what we took of it, we give back
            os.unlink(name, dir_fd=directory)
            raise
        if state.hexdigest() != sha:
            os.unlink(name, dir_fd=directory)
            return False
        os.rename(name, sha, src_dir_fd=directory, dst_dir_fd=directory)
    return True


def hold(part: int) -> None:
    """Lock a partial blob for the one receiver that writes it. Who only looks holds it for an instant."""
    deadline = time.monotonic() + 1
    while True:
        try:
            return fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise HostError("locked", "another upload to this host is under way; wait for it") from None
            time.sleep(0.05)
