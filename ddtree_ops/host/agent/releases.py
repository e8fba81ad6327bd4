"""The releases of this host: would one fit, what of it is missing, install it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .base import JSON, HostError, absolute, fsync_dir, make_dir, member, read_json
from .fitting import fitting_python
from .making import build_release, erase
from .manifest import Manifest
from .service import Service
from .staging import staging_facts
from .store import has_blob, ingest

BLOCK = 4096
RESERVED = 32 << 20  # bytes left free beside what a release needs


def installed(root: Path, release: str) -> bool:
    home = root / "releases" / release
    return not home.is_symlink() and read_json(home / "installed.json") is not None


def missing(service: Service, request: JSON) -> JSON:
    """Whether the release would fit here, and what of it the host lacks. Refuses before anything is sent; no write.

    {"installed", "missing": [sha256], "complete": [sha256], "partial": {sha256: bytes}}, the last two of staging.
    """
    manifest = Manifest.of(member(request, "manifest", dict))
    if installed(service.root, manifest.id):
        return {"installed": True, "missing": [], "complete": [], "partial": {}}
    fitting_python(manifest.text)
    staging = absolute(request["staging"], "staging") if request.get("staging") is not None else None
    lacking = [sha for sha, size in manifest.blobs.items() if not has_blob(service.root, sha, size)]
    there = staging_facts(staging, manifest.blobs) if staging is not None else {"complete": [], "partial": {}}
    require_room(service.root, staging, manifest, lacking, there)
    return {"installed": False, "missing": lacking, **there}


def require_room(root: Path, staging: Path | None, manifest: Manifest, lacking: list[str], there: JSON) -> None:
    """Refused when a disk is read-only or has too little room for staging, store and the release with its byte code."""
    import shutil  # not at the head: a question needs none of it

    arriving = sum(manifest.blobs[sha] for sha in lacking)
    here = sum(manifest.blobs[sha] for sha in set(there["complete"])) + sum(there["partial"].values())
    blocks = sum(-(-size // BLOCK) for _, size, _ in manifest.files.values())
    release = blocks * BLOCK * 5 // 4 + len(manifest.files) * BLOCK + RESERVED
    needs: dict[Path, int] = {root: arriving + release}
    if staging is not None:
        needs[staging] = max(0, arriving - here)
    by_device: dict[int, list[tuple[Path, int]]] = {}
    for path, need in needs.items():
        there_is = existing(path)
        if os.statvfs(there_is).f_flag & os.ST_RDONLY:
            raise HostError("refused", f"{there_is} is on a read-only file system; {path} cannot be written")
        by_device.setdefault(there_is.stat().st_dev, []).append((there_is, need))
    for group in by_device.values():
        # A staged blob is gone once it is in the store, all of them before the release is made.
        need, free = max(size for _, size in group), shutil.disk_usage(group[0][0]).free
        if free < need:
            where = " and ".join(str(path) for path in needs if existing(path) in {path for path, _ in group})
            raise HostError("disk-full", f"the release needs {need >> 20} MiB, {free >> 20} MiB are free at {where}")


def existing(path: Path) -> Path:
    return next(inner for inner in (path, *path.parents) if inner.exists())


@contextlib.contextmanager
def releases_lock(root: Path, patience: float) -> Iterator[Path]:
    """Alone with releases and store, while blobs come in, a release is made or pruned. Yields the directory."""
    base = make_dir(root / "releases")
    deadline = time.monotonic() + patience
    with (base / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostError("locked", "another release is being installed or pruned here") from None
                time.sleep(0.1)
        yield base


def install(service: Service, request: JSON) -> JSON:
    """Take what arrived in staging and build ``releases/<id>`` from the store, or nothing.

    {"installed": id, "already", "warnings"}; or, when blobs are not here or not what they should be, "installed"
    None with "missing" and "wrong" (removed again): send those.
    """
    manifest, root = Manifest.of(member(request, "manifest", dict)), service.root
    if installed(root, manifest.id):
        return {"installed": manifest.id, "already": True, "warnings": []}
    python = fitting_python(manifest.text)
    with releases_lock(root, patience=1800) as base:
        if installed(root, manifest.id):
            return {"installed": manifest.id, "already": True, "warnings": []}
        for stale in base.glob("*.tmp-*"):
            erase(stale)
        lacking = [sha for sha, size in manifest.blobs.items() if not has_blob(root, sha, size)]
        if lacking and request.get("staging") is None:
            return {"installed": None, "missing": lacking, "wrong": []}
        if lacking:
            found = ingest(root, absolute(request["staging"], "staging"), lacking)
            if found["missing"] or found["wrong"]:
                return {"installed": None, **found}
        require_room(root, None, manifest, [], {"complete": [], "partial": {}})
        if (base / manifest.id).is_symlink() or (base / manifest.id).exists():
            raise HostError("refused", f"{base / manifest.id} is there and is no installed release; remove it")
        temp = base / f"{manifest.id}.tmp-{os.urandom(4).hex()}"
        try:
            warnings = build_release(root, temp, base / manifest.id, manifest, python)
            temp.rename(base / manifest.id)
            fsync_dir(base)
        except BaseException:
            erase(temp)
            raise
    return {"installed": manifest.id, "already": False, "files": len(manifest.files), "warnings": warnings}
