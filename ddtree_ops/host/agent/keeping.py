"""Housekeeping: which releases are here and who needs them; removing what nobody does."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from .base import (
    JSON,
    RELEASE,
    SHA256,
    HostError,
    absolute,
    fsync_dir,
    integer,
    member,
    pattern,
    read_bytes,
    read_json,
    safe,
)
from .facts import history
from .making import erase
from .releases import installed, releases_lock
from .service import Service
from .staging import PACK, settled_size
from .system import pids

STALE_S = 3600  # staging that was touched later may be an upload between two of its tries
HOME = pattern(r"[0-9a-f]{16,64}(\.tmp-[0-9a-f]+)?")
OLDER = "older generation"  # the one use that keeps nothing


def services(root: Path) -> list[Service]:
    """Every service that was ever deployed below this root."""
    homes = sorted((root / "services").iterdir()) if (root / "services").is_dir() else []
    return [Service.at(root, home.name) for home in homes if (home / "service.json").exists()]


def users(root: Path) -> dict[str, list[JSON]]:
    """release -> [{"service", "generation", "role"}]. Raises stuck or failed when a needed generation is damaged."""
    found: dict[str, list[JSON]] = {}
    for service in services(root):
        state, told = service.state(), history(service, {})["generations"]
        confirmed, pending = state["confirmed"], state["pending"] or {}
        earlier = [row["n"] for row in told if row["confirmed"] and confirmed is not None and row["n"] < confirmed]
        roles = {row["n"]: OLDER for row in told}
        roles.update(dict.fromkeys(earlier[-1:], "rollback"))
        roles.update({pending[key]: "unfinished deploy" for key in ("from", "to") if pending.get(key) is not None})
        if confirmed is not None:
            roles[confirmed] = "running" if service.sup.show()["state"] == "active" else "current"
        for n, role in roles.items():
            if role == OLDER and read_json(service.generation(n) / "generation.json") is None:
                continue
            if role == "unfinished deploy" and not service.generation(n).is_dir():
                continue  # it had not come as far as writing it
            release = service.meta(n).get("release")
            if release is not None:
                found.setdefault(str(release), []).append({"service": service.name, "generation": n, "role": role})
    inside = re.compile(re.escape(os.fsencode(root)) + rb"/releases/([0-9a-f]{16,64})/")
    for pid in pids():
        seen = b"".join(read_bytes(Path(f"/proc/{pid}/{name}"), 8 << 20) or b"" for name in ("cmdline", "maps"))
        for name in {match.decode() for match in inside.findall(seen)}:
            if not any(use["role"] == "running" for use in found.get(name, [])):
                found.setdefault(name, []).append({"service": None, "generation": None, "role": f"process {pid}"})
    return found


def disk_use(tree: Path) -> int:
    """Bytes on disk of a tree, links not followed."""
    total = 0
    for directory, _, names in os.walk(tree):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(directory) / name).st_blocks * 512
    return total


def releases(service: Service, _: JSON) -> JSON:
    """Every release here, newest first: {"id", "seq", "installed", "bytes", "engine", "arch", "users", "whole"}."""
    root, used, rows = service.root, users(service.root), []
    homes = sorted((root / "releases").iterdir()) if (root / "releases").is_dir() else []
    for home in homes:
        if not HOME.fullmatch(home.name):  # not ours
            continue
        told, manifest = read_json(home / "installed.json") or {}, read_json(home / "manifest.json", 256 << 20) or {}
        row = {
            "id": home.name,
            "seq": told.get("seq") or 0,
            "installed": told.get("installed"),
            "bytes": disk_use(home),
        }
        row.update({key: manifest.get(key) for key in ("engine", "base", "arch")}, users=used.get(home.name, []))
        rows.append({**row, "whole": RELEASE.fullmatch(home.name) is not None and installed(root, home.name)})
    rows.sort(key=lambda row: (row["whole"], row["seq"], row["installed"] or 0), reverse=True)
    return {"releases": rows, "store": disk_use(root / "store"), "now": time.time()}


def prune(service: Service, request: JSON) -> JSON:
    """Remove what nobody needs, or with ``dry`` tell what that would be.

    Kept: the ``keep`` newest releases, and every one that a service runs, that its unfinished deploy or its rollback
    needs, or that a process uses. Gone: the others, what is no whole release, blobs that no kept release has, stale
    staging. ``expect``: the ids that were shown; moved when it would be others now. No deploy and no install of this
    host can be under way meanwhile: locked.
    """
    root, keep = service.root, integer(request.get("keep"), "keep", 1, 1000)
    dry, expect = member(request, "dry", bool), member(request, "expect", (list, type(None)), None)
    who, client = safe(str(request.get("who", "")), cap=100), safe(str(request.get("client", "")), cap=100)
    staging = absolute(request["staging"], "staging") if request.get("staging") is not None else None
    txn = f"prune-{int(time.time())}-{os.urandom(2).hex()}"
    if dry:
        return choose(service, keep, staging)
    with contextlib.ExitStack() as locks:
        for other in services(root):
            locks.enter_context(other.lock(txn, who, client))
        locks.enter_context(releases_lock(root, patience=5))
        chosen = choose(service, keep, staging)
        gone = [row["id"] for row in chosen["remove"]]
        if expect is not None and gone != expect:
            raise HostError("moved", f"what would be removed is no longer what was shown, but {', '.join(gone) or '-'}")
        for name in gone:
            discard(root / "releases", name)
        for path in unneeded_blobs(root, {row["id"] for row in chosen["keep"]}):
            path.unlink()
        for path in stale_staging(staging):
            clear_staging(path)
        lost = {use["service"] for row in chosen["remove"] for use in row["users"]}
        for other in services(root):
            if other.name in lost:
                other.log(txn, "prune", "note", who=who, client=client, reason="removed release " + ", ".join(gone))
    return chosen


def choose(service: Service, keep: int, staging: Path | None) -> JSON:
    """{"keep": [row with "why"], "remove": [row], "blobs": {"count", "bytes"}, "staging": [path], "bytes"}."""
    kept: list[JSON] = []
    removed: list[JSON] = []
    newest = 0
    for row in releases(service, {})["releases"]:
        newest += bool(row["whole"])
        why = [use["role"] for use in row["users"] if use["role"] != OLDER]
        if row["whole"] and newest <= keep:
            why.append(f"one of the {keep} newest")
        (kept if why else removed).append({**row, "why": why})
    blobs = list(unneeded_blobs(service.root, {row["id"] for row in kept}))
    sizes = [path.lstat().st_blocks * 512 for path in blobs]
    left = [str(path) for path in stale_staging(staging)]
    total = sum(sizes) + sum(row["bytes"] for row in removed) + sum(disk_use(Path(path)) for path in left)
    found = {"count": len(blobs), "bytes": sum(sizes)}
    return {"keep": kept, "remove": removed, "blobs": found, "staging": left, "bytes": total}


def unneeded_blobs(root: Path, kept: set[str]) -> Iterator[Path]:
    """What of the store no kept release has. Refused when a kept release's manifest cannot be read."""
    needed: set[str] = set()
    for name in kept:
        manifest = read_json(root / "releases" / name / "manifest.json", 256 << 20)
        if manifest is None:
            raise HostError("refused", f"the manifest of release {name} is damaged: nothing says which blobs it needs")
        needed.update(str(file.get("sha256")) for file in member(manifest, "files", list))
    store = root / "store"
    if store.is_symlink():
        return
    yield from store.glob(".*.tmp")
    for path in store.glob("[0-9a-f][0-9a-f]/*"):
        if path.name not in needed and not path.parent.is_symlink() and not path.is_dir():
            yield path


def discard(base: Path, name: str) -> None:
    """Remove a release: in one step none any more, then its files. What is left after a kill is no release."""
    gone = base / f"{name.partition('.')[0]}.tmp-{os.urandom(4).hex()}"
    (base / name).rename(gone)
    fsync_dir(base)
    erase(gone)


def stale_staging(staging: Path | None) -> Iterator[Path]:
    """Staging directories beside this one, of any user, that no upload touched for an hour."""
    for path in sorted(staging.parent.glob("ddtree-staging-*")) if staging is not None else ():
        with contextlib.suppress(OSError):
            if not path.is_symlink() and path.is_dir():
                touched = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
                if time.time() - touched > STALE_S:
                    yield path


def clear_staging(path: Path) -> None:
    """Remove what an upload left there, nothing else, through no link; not while somebody sends."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for name in os.listdir(fd):  # noqa: PTH208  of the descriptor, whatever the path is by now
                sha, _, suffix = name.partition(".")
                if PACK.fullmatch(name) or (SHA256.fullmatch(sha) and suffix in ("", "part")):
                    if suffix:
                        settled_size(name, fd)
                    os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
        path.rmdir()
