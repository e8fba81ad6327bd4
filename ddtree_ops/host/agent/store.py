"""Root's store of blobs, filled from the SSH user's staging."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .base import JSON, HostError, make_dir, sync_filesystem
from .staging import Packs, own_file, own_staging

if TYPE_CHECKING:
    from typing import IO

BATCH = 256 << 20  # bytes that are in staging and in the store at once, packs apart


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
    with contextlib.ExitStack() as stack:
        directory = own_staging(staging)
        stack.callback(os.close, directory)
        packs = Packs(directory, set(wanted))
        stack.callback(packs.close)
        for batch in batches(directory, wanted):
            ingest_batch(root, directory, packs, batch, found)
        packs.clear(lambda sha: blob_path(root, sha).is_file())
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


def ingest_batch(root: Path, directory: int, packs: Packs, batch: list[str], found: dict[str, list[str]]) -> None:
    temps: dict[str, Path] = {}
    store = store_dir(root)
    try:
        for sha in batch:
            temp = store / f".{sha}.{os.urandom(4).hex()}.tmp"
            try:
                right = take(directory, packs, sha, temp)
            except FileNotFoundError:
                found["missing"].append(sha)
                continue
            temps[sha] = temp
            if not right:
                found["wrong"].append(sha)
                unstage(directory, packs, sha)
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


def take(directory: int, packs: Packs, sha: str, temp: Path) -> bool:
    """Copy a staged blob to ``temp``; whether the copy is what its name says. Raises FileNotFoundError."""
    content = packs.content(sha)
    if content is not None:
        with open_new(temp) as target:
            target.write(content)
        return hashlib.sha256(content).hexdigest() == sha
    with os.fdopen(own_file(sha, directory), "rb") as source, open_new(temp) as target:
        clone(source, target)
        return hash_file(target) == sha


def open_new(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb+")


def unstage(directory: int, packs: Packs, sha: str) -> None:
    """A staged blob, wherever it is."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(sha, dir_fd=directory)
    packs.drop(sha)
