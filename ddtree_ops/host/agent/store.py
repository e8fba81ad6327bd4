"""Blobs: over the link into the SSH user's staging, from there into root's store.

The stream is one gzip member. Decompressed it is, for each blob, a line ``<sha256> <offset> <length>`` and that many
bytes: a blob that arrived in part goes on at its ``offset``.
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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .base import JSON, SHA256, HostError, absolute, make_dir, named, sync_filesystem

if TYPE_CHECKING:
    from typing import IO, Any

IDLE_S = 12.0  # a sender whose link is that long silent is gone: its own end gives up after 10 s
SETTLE_PARTS_S = 3.0  # what a broken connection still had in its pipes has arrived by then
BATCH = 256 << 20  # bytes that are in staging and in the store at once
CHUNK = 1 << 18


def blob_path(root: Path, sha: str) -> Path:
    return root / "store" / sha[:2] / sha


def has_blob(root: Path, sha: str, size: int) -> bool:
    """Whether the store has it. Refused when what is there is no plain file of ours, or not that long."""
    path = blob_path(root, sha)
    for inner in (path.parents[1], path.parent, path):
        try:
            status = inner.lstat()
        except FileNotFoundError:
            return False
        wanted = stat.S_ISREG if inner is path else stat.S_ISDIR
        if not wanted(status.st_mode) or status.st_uid != os.geteuid():
            raise HostError("refused", f"{inner} is not a plain file or directory of ours; remove it")
    if status.st_size != size:
        raise HostError("failed", f"blob {sha} is damaged in the store; remove {path} and ship it again")
    return True


def store_dir(root: Path, sha: str = "") -> Path:
    """The store, or the blob's directory in it, made if need be. Refused when it is a link or somebody else's."""
    path = blob_path(root, sha).parent if sha else root / "store"
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise HostError("refused", f"{path} is not a directory of ours; remove it")
    return make_dir(path, 0o700)


# staging


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


def staging_facts(path: Path) -> JSON:
    """As `staged`. Waits for the receiver that a cut link left behind; locked when one is still being fed."""
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
            sha, _, suffix = name.partition(".")
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


class Inflated:
    """The stream as it comes: what arrived can be read at once. Memory is bounded whatever it expands to."""

    def __init__(self, fd: int) -> None:
        self._fd, self._inflate = fd, zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._ready, self._at = b"", 0  # what was inflated, and how much of it is taken

    def _filled(self) -> bool:
        """Whether there is a byte to take; False at the good end. Raises cut, or failed when it is damaged."""
        while self._at >= len(self._ready):
            if self._inflate.eof:
                return False
            data = self._inflate.unconsumed_tail
            if not data:
                if not select.select([self._fd], [], [], IDLE_S)[0]:
                    raise HostError("cut", f"no byte came for {IDLE_S:g} s: the link is taken for dead")
                data = os.read(self._fd, CHUNK)
                if not data:
                    raise HostError("cut", "the stream was cut")
            try:
                self._ready, self._at = self._inflate.decompress(data, 1 << 20), 0
            except zlib.error as error:
                raise HostError("failed", f"the stream is damaged: {error}") from error
        return True

    def _take(self, end: int) -> bytes:
        found = self._ready[self._at : end]
        self._at += len(found)
        return found

    def some(self, limit: int) -> bytes:
        """At least one byte and at most ``limit``; b"" at the good end. Raises cut, or failed when it is damaged."""
        return self._take(self._at + limit) if self._filled() else b""

    def line(self) -> bytes:
        """Up to a newline, without it; b"" at the end. A line that does not end is given up after 200 bytes."""
        line = b""
        while not line.endswith(b"\n") and len(line) <= 200 and self._filled():
            last = self._at + 201 - len(line)
            line += self._take(self._ready.find(b"\n", self._at, last) + 1 or last)
        return line.rstrip(b"\n")


def receive(staging: Path, fd: int) -> JSON:
    """Write the stream's blobs; each gets its name once its hash is right. ``wrong``: those that had another."""
    directory, stream, count = own_staging(staging, create=True), Inflated(fd), 0
    wrong: list[str] = []
    try:
        while head := stream.line():
            words = head.decode("ascii", "replace").split(" ")
            if len(words) != 3 or not (words[1].isdigit() and words[2].isdigit()):
                raise HostError("refused", "the stream is not one of blobs")
            sha, offset, length = named(SHA256, words[0], "blob"), int(words[1]), int(words[2])
            if receive_blob(stream, directory, sha, offset, length):
                count += 1
            else:
                wrong.append(sha)
    finally:
        os.close(directory)
    return {"received": count, "wrong": wrong}


def receive_blob(stream: Inflated, directory: int, sha: str, offset: int, length: int) -> bool:
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


# into the store


def clone(source: IO[bytes], target: IO[bytes]) -> None:
    """Reflink where the filesystem can, else copy. Never a hard link: one write would corrupt every release."""
    import shutil  # not at the head: a question needs none of it

    ficlone = 0x40049409
    try:
        fcntl.ioctl(target.fileno(), ficlone, source.fileno())
    except OSError:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()


def hash_file(file: IO[bytes]) -> str:
    state = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(1 << 20):
        state.update(chunk)
    return state.hexdigest()


def ingest(root: Path, staging: Path, hashes: list[str]) -> JSON:
    """Move blobs from staging into the store; what is hashed is root's copy, which nobody else can touch.

    ``missing``: those that are in neither; ``wrong``: those whose content was another, removed from staging.
    """
    found: dict[str, list[str]] = {"missing": [], "wrong": []}
    wanted = [sha for sha in hashes if not blob_path(root, sha).is_file()]
    if not wanted:
        return found
    directory = own_staging(staging)
    try:
        for batch in batches(directory, wanted):
            ingest_batch(root, directory, batch, found)
    finally:
        os.close(directory)
    return found


def batches(directory: int, wanted: list[str]) -> Iterator[list[str]]:
    """The hashes in groups of about `BATCH` bytes: so much is on the disk twice, and no more."""
    batch: list[str] = []
    size = 0
    for sha in wanted:
        with contextlib.suppress(FileNotFoundError):
            size += os.stat(sha, dir_fd=directory, follow_symlinks=False).st_size
        batch.append(sha)
        if size > BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def ingest_batch(root: Path, directory: int, batch: list[str], found: dict[str, list[str]]) -> None:
    temps: dict[str, Path] = {}
    store = store_dir(root)
    try:
        for sha in batch:
            temp = store / f".{sha}.{os.urandom(4).hex()}.tmp"
            try:
                right = take(directory, sha, temp)
            except FileNotFoundError:
                found["missing"].append(sha)
                continue
            temps[sha] = temp
            if not right:
                found["wrong"].append(sha)
                os.unlink(sha, dir_fd=directory)
                temps.pop(sha).unlink()
        sync_filesystem(store)
        for sha, temp in temps.items():
            temp.rename(store_dir(root, sha) / sha)
        sync_filesystem(store)
        for sha in temps:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(sha, dir_fd=directory)
    finally:
        for temp in store.glob(".*.tmp"):
            temp.unlink(missing_ok=True)


def take(directory: int, sha: str, temp: Path) -> bool:
    """Copy a staged blob to ``temp``; whether the copy is what its name says. Raises FileNotFoundError."""
    try:
        inner = os.open(sha, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise HostError("refused", f"blob {sha} in staging: {error.strerror}") from error
    with os.fdopen(inner, "rb") as source:
        status, owner = os.fstat(inner), os.fstat(directory).st_uid
        if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
            raise HostError("refused", f"blob {sha} in staging is not a regular file of uid {owner}")
        with os.fdopen(os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb+") as target:
            clone(source, target)
            return hash_file(target) == sha
