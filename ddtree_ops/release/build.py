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
from .fetch import fetch
from .wheels import members, unpack

#: Of the manifest. Raise RECIPE when the same wheels and sources would give other files than before.
FORMAT = 1
RECIPE = 1
#: progress(what, done, total), in bytes.
Progress = Callable[[str, int, int], None]
PACKAGE = Path(__file__).parents[1]
#: What uvicorn loads by name, besides what the engine's own modules import.
LOADED_BY_NAME = ("uvicorn.lifespan.on", "uvicorn.loops.auto", "uvicorn.protocols.http.auto")


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


@dataclass(frozen=True)
class _Inputs:
    """Everything that decides a release, read at once."""

    engine: str
    arch: str
    lock: Lock
    own: dict[str, bytes]

    @property
    def smoke(self) -> list[str]:
        """Imports that the host tries before the release counts as installed: all of the engine."""
        packages = f"{site_packages(self.lock.python)}/"
        own = [path.removeprefix(packages) for path in self.own if path.startswith(packages)]
        modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in sorted(own)]
        return [f"import {module}" for module in ("torch", *modules, *LOADED_BY_NAME)]

    def release_id(self) -> str:
        """First 16 hex digits of a sha256 over all of it. A pin has one hash, so wheels need not be fetched for it."""
        inputs = {
            "recipe": [FORMAT, RECIPE, [pattern for pattern, _ in TRIM], [pattern for pattern, _ in KEEP], self.smoke],
            "release": [self.engine, self.arch, self.lock.requires],
            "pins": sorted([pin.requirement, pin.sha256] for pin in self.lock.pins),
            "own": {path: hashlib.sha256(content).hexdigest() for path, content in self.own.items()},
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def release_id(engine: str, *, python: str = "3.11", arch: str = "none") -> str:
    """The id that `build` would give; contacts and writes nothing. Raises as `build` does for what is not here."""
    return _inputs(engine, arch, load_lock(engine, python), PACKAGE).release_id()


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
    inputs = _inputs(engine, arch, lock or load_lock(engine, python), package)
    release = inputs.release_id()
    manifest = cache.finished(release)
    if manifest is None:
        wheels = fetch(inputs.lock, cache)
        files = _wheel_files(wheels, inputs.lock.python, cache, progress or (lambda what, done, total: None))
        for path, content in inputs.own.items():
            sha256, size = cache.add_blob([content])
            _add(files, path, {"sha256": sha256, "size": size, "mode": 0o644})
        manifest = _manifest(release, inputs, files)
        cache.finish(manifest)
    return Release(release, manifest, cache)


def _inputs(engine: str, arch: str, lock: Lock, package: Path) -> _Inputs:
    own = {path: file.read_bytes() for path, file in reference_files(package, lock.python).items()}
    return _Inputs(engine, arch, lock, own)


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
        mode = 0o755 if member.executable else 0o644
        path = f"{site_packages(python)}/{member.path}"
        _add(files, path, {"sha256": member.sha256, "size": member.size, "mode": mode})
        done += member.size
        progress("building the release", done, total)
    return files


def _add(files: dict[str, dict[str, Any]], path: str, entry: dict[str, Any]) -> None:
    if files.setdefault(path, entry) != entry:
        raise Failed(f"two parts of the release have different files at {path}")


def _manifest(release: str, inputs: _Inputs, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "id": release,
        "engine": inputs.engine,
        "arch": inputs.arch,
        "requires": inputs.lock.requires,
        "pins": sorted(pin.requirement for pin in inputs.lock.pins),
        "patches": [],
        "files": [{"path": path, **files[path]} for path in sorted(files)],
        "smoke": inputs.smoke,
        "total_size": sum(entry["size"] for entry in files.values()),
    }
