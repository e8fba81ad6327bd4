"""``build``: the release of an engine. Same inputs, same id, on any day, in any directory, under any umask."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Failed
from .cache import Cache
from .lock import Lock, load_lock
from .trim import KEEP, TRIM, is_trimmed
from .wheels import fetch, members, unpack

FORMAT = 1
ID_LENGTH = 16
#: progress(what, done, total), in bytes.
Progress = Callable[[str, int, int], None]
PACKAGE = Path(__file__).parents[1]
#: Run on the host in the new release before it counts as installed: the engine whole, and what uvicorn loads by name.
SMOKE = (
    "import torch",
    "import importlib, pkgutil, ddtree_ops.engine as e; "
    "[importlib.import_module(m.name) for m in pkgutil.iter_modules(e.__path__, e.__name__ + '.')]",
    "import uvicorn.lifespan.on, uvicorn.loops.auto, uvicorn.protocols.http.auto",
)


@dataclass(frozen=True)
class Release:
    """A finished release: its manifest, and where each file's content is.

    ``manifest``: {"format", "id", "engine", "arch", "requires": {"python", "machine", "glibc"}, "pins", "patches",
    "files": [{"path", "sha256", "size", "mode"}] sorted by path, "smoke", "total_size"}. A path is relative to the
    release's directory on the host: ``venv/lib/python3.11/site-packages/...`` or ``share/...``.
    """

    id: str
    manifest: dict[str, Any]
    cache: Cache

    def blob(self, sha256: str) -> Path:
        """The file with this content."""
        return self.cache.blob(sha256)


def build(
    engine: str,
    *,
    python: str = "3.11",
    arch: str = "none",
    cache: Cache | None = None,
    progress: Progress | None = None,
    package: Path = PACKAGE,
    lock: Lock | None = None,
) -> Release:
    """The release of ``engine`` for a host's Python and GPU arch, from the cache when nothing changed.

    ``package`` and ``lock`` name other sources than this installation's own. Raises UsageError for an engine or Python
    without a lock file, Failed when a wheel cannot be had or is not what it should be.
    """
    cache = cache or Cache()
    lock = lock or load_lock(engine, python)
    own = _own_files(package, lock)
    inputs = _inputs(engine, arch, lock, own)
    manifest = cache.finished(inputs)
    if manifest is None:
        files = _wheel_files(fetch(lock, cache), lock.python, cache, progress or (lambda what, done, total: None))
        for path, content in own.items():
            sha256, size = cache.add_blob([content])
            _add(files, path, {"sha256": sha256, "size": size, "mode": "0644"})
        manifest = _manifest(inputs[:ID_LENGTH], engine, arch, lock, files)
        cache.finish(inputs, manifest)
    return Release(manifest["id"], manifest, cache)


def release_id(engine: str, *, python: str = "3.11", arch: str = "none", package: Path = PACKAGE) -> str:
    """The id that ``build`` gives for these inputs, without building: a hash of everything that goes in.

    Wheels count by their hashes in the lock file, our own files by content. Raises as ``build``.
    """
    lock = load_lock(engine, python)
    return _inputs(engine, arch, lock, _own_files(package, lock))[:ID_LENGTH]


def _own_files(package: Path, lock: Lock) -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in reference_files(package, lock.python).items()}


def _inputs(engine: str, arch: str, lock: Lock, own: dict[str, bytes]) -> str:
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in own.items()}
    return hashlib.sha256(_canonical([FORMAT, engine, arch, lock.text, TRIM, KEEP, SMOKE, hashes])).hexdigest()


def site_packages(python: str) -> str:
    """Where a release keeps its modules, relative to its directory."""
    return f"venv/lib/python{python}/site-packages"


def reference_files(package: Path, python: str) -> dict[str, Path]:
    """What the reference engine adds to its wheels: the engine itself, and the tiny pair under share/."""
    engine = package / "engine"
    pair = engine / "pair"
    if not (engine / "__init__.py").is_file():
        raise Failed(f"this installation has no reference engine ({engine})")
    modules = [package / "__init__.py", *(path for path in engine.rglob("*.py") if pair not in path.parents)]
    files = {f"{site_packages(python)}/ddtree_ops/{path.relative_to(package).as_posix()}": path for path in modules}
    for path in pair.rglob("*"):
        name = path.relative_to(pair)
        if path.is_file() and "__pycache__" not in name.parts and not any(part.startswith(".") for part in name.parts):
            files[f"share/pair/{name.as_posix()}"] = path
    return files


def _wheel_files(wheels: list[Path], python: str, cache: Cache, progress: Progress) -> dict[str, dict[str, Any]]:
    """Path -> {"sha256", "size", "mode"} of what is kept of the wheels; all of it is then in the cache."""
    kept = [member for wheel in wheels for member in members(wheel) if not is_trimmed(member.path)]
    files: dict[str, dict[str, Any]] = {}
    total, done = sum(member.size for member in kept), 0
    for member in unpack(kept, cache):
        mode = "0755" if member.executable else "0644"
        path = f"{site_packages(python)}/{member.path}"
        _add(files, path, {"sha256": member.sha256, "size": member.size, "mode": mode})
        done += member.size
        progress("unpack", done, total)
    return files


def _add(files: dict[str, dict[str, Any]], path: str, entry: dict[str, Any]) -> None:
    if files.setdefault(path, entry) != entry:
        raise Failed(f"two parts of the release have different files at {path}")


def _manifest(release: str, engine: str, arch: str, lock: Lock, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "id": release,
        "engine": engine,
        "arch": arch,
        "requires": {"python": lock.python, "machine": lock.machine, "glibc": lock.glibc},
        "pins": sorted(pin.requirement for pin in lock.pins),
        "patches": [],
        "files": [{"path": path, **files[path]} for path in sorted(files)],
        "smoke": list(SMOKE),
        "total_size": sum(entry["size"] for entry in files.values()),
    }


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
