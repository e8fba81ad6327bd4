"""``build``: the release of an engine. Same inputs, same id, on any day, in any directory, under any umask.

What only making one needs (pip, zip files) is imported there: every plan asks for an id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import data_dir
from ..errors import Failed, UsageError
from .cache import Cache
from .choice import Choice, Target, choose
from .lock import Lock, Pin, load_lock, normal
from .patchset import PatchSet, load_patchset, untried
from .progress import Progress
from .trim import KEEP, Rule, left_out_by

#: Of the manifest. Raise RECIPE when the same wheels and sources would give other files than before.
FORMAT = 2
RECIPE = 3
PACKAGE = Path(__file__).parents[1]
#: What uvicorn loads by name, besides what the engine's own modules import.
LOADED_BY_NAME = ("uvicorn.lifespan.on", "uvicorn.loops.auto", "uvicorn.protocols.http.auto")
#: The launcher imports all of its Python, and the extension that does the work.
ROUTER_SMOKE = ("sglang_router.sglang_router_rs", "sglang_router.launch_router")
#: What a server of SGLang imports before it is up, kernels first: a wrong ABI shows there.
SGLANG_SMOKE = (
    *("torch", "triton", "sgl_kernel", "sglang", "sglang.srt.server_args"),
    *("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server"),
)


@dataclass(frozen=True)
class Release:
    """A finished release: its manifest, and where each file's content is.

    ``manifest``: {"format", "id", "engine", "base", "arch", "slim", "requires": {"python", "machine", "glibc",
    "driver", "provided": {name: version}}, "wheels": "ship" | "index", "index_requirements": [{"name", "version",
    "hashes"}], "pins", "patches": [{"name", "sha256"}], "files": [{"path", "sha256", "size", "mode"}] sorted by path,
    "smoke", "left_out": [{"what", "why", "proven", "files", "bytes"}] (null for distributions, which are not
    fetched), "total_size"}. A path is relative to the release's directory on the host:
    ``venv/lib/python3.11/site-packages/...`` or ``share/...``.
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

    target: Target
    lock: Lock
    choice: Choice
    patchset: PatchSet
    own: dict[str, bytes]

    @property
    def smoke(self) -> list[str]:
        """Imports (and what the patches ask for) that the host tries before the release counts as installed."""
        if self.target.engine == "sglang":
            return [*(f"import {module}" for module in SGLANG_SMOKE), *self.patchset.smoke]
        if self.target.engine == "router":
            return [f"import {module}" for module in ROUTER_SMOKE]
        packages = f"{site_packages(self.lock.python)}/"
        own = [path.removeprefix(packages) for path in self.own if path.startswith(packages)]
        modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in sorted(own)]
        return [f"import {module}" for module in ("torch", *modules, *LOADED_BY_NAME)]

    @property
    def requires(self) -> dict[str, Any]:
        driver = self.lock.driver if self.target.arch != "none" else None
        return {**self.lock.requires, "driver": driver, "provided": self.choice.provided}

    @property
    def patched(self) -> Pin | None:
        """The pin that the patches are for."""
        name = normal((self.lock.resolve or "").partition("==")[0])
        return next((pin for pin in self.lock.pins if self.patchset and pin.name == name), None)

    @property
    def shipped(self) -> tuple[Pin, ...]:
        if self.target.wheels == "ship":
            return self.choice.pins
        return () if self.patched is None else (self.patched,)

    @property
    def indexed(self) -> tuple[Pin, ...]:
        return tuple(pin for pin in self.choice.pins if pin not in self.shipped)

    def release_id(self) -> str:
        """First 16 hex digits of a sha256 over all of it. A pin has one hash, so wheels need not be fetched for it."""
        inputs = {
            "recipe": [FORMAT, RECIPE, [rule.what for rule in self.choice.trim], [rule.what for rule in KEEP]],
            "target": [self.target.base, self.target.arch, self.target.wheels, self.target.slim],
            "requires": self.requires,
            "smoke": self.smoke,
            "pins": sorted([pin.requirement, pin.sha256] for pin in self.choice.pins),
            "patches": self.patchset.listing,
            "own": {path: hashlib.sha256(content).hexdigest() for path, content in self.own.items()},
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def release_id(target: Target) -> str:
    """The id that `build` would give; contacts and writes nothing. Raises as `build` does for what is not here."""
    return _inputs(target, load_lock(target.base, target.python), PACKAGE, None).release_id()


def build(
    target: Target,
    *,
    cache: Cache | None = None,
    progress: Progress = lambda what, done, total: None,
    package: Path = PACKAGE,
    lock: Lock | None = None,
    patches: Path | None = None,
) -> Release:
    """The release for a host's Python and GPU arch, from the cache when nothing changed.

    ``package``, ``lock`` and ``patches`` (a directory of one base) name other sources than this installation's own.
    Raises UsageError for a base or Python without a lock file, Failed when a wheel cannot be had or is not what it
    should be, or a patch does not fit exactly.
    """
    cache = cache or Cache()
    inputs = _inputs(target, lock or load_lock(target.base, target.python), package, patches)
    release = inputs.release_id()
    manifest = cache.finished(release)
    if manifest is None:
        try:
            manifest = _make(release, inputs, cache, progress)
            cache.finish(manifest)
        except OSError as error:
            hint = "a build needs room there for the wheels and for what they unpack to; XDG_CACHE_HOME moves it"
            raise Failed(f"cannot build below {cache.directory}: {error.strerror or error}", hint=hint) from error
    return Release(release, manifest, cache)


def untried_base(base: str) -> str | None:
    """Why no release of a base should serve yet, for an operator; None where nothing is said against it."""
    return untried(data_dir("patches") / base)


def _make(release: str, inputs: _Inputs, cache: Cache, progress: Progress) -> dict[str, Any]:
    """The manifest, with every file in the cache."""
    with _wheels(inputs, cache, progress) as wheels:
        files, left_out = _wheel_files(inputs, wheels, cache, progress)
    for path, content in inputs.own.items():
        sha256, size = cache.add_blob([content])
        _add(files, path, {"sha256": sha256, "size": size, "mode": 0o644})
    return _manifest(release, inputs, files, left_out)


def _inputs(target: Target, lock: Lock, package: Path, patches: Path | None) -> _Inputs:
    own: dict[str, bytes] = {}
    patchset = PatchSet()
    if target.engine == "reference":
        own = {path: file.read_bytes() for path, file in reference_files(package, lock.python).items()}
    elif target.engine == "sglang":
        directory = patches or data_dir("patches") / target.base
        patchset = load_patchset(directory)
        if target.slim and (why := untried(directory)):
            raise UsageError(f"--slim leaves out what a base has served without, which {target.base} has not: {why}")
    return _Inputs(target, lock, choose(target, lock), patchset, own)


@contextlib.contextmanager
def _wheels(inputs: _Inputs, cache: Cache, progress: Progress) -> Iterator[list[Path]]:
    """The wheels to ship, the patched one in the place of the stock one."""
    from .fetch import fetch
    from .repack import repack

    pins = dataclasses.replace(inputs.lock, pins=inputs.shipped)
    with cache.scratch() as scratch:
        yield [
            repack(wheel, inputs.patchset, scratch) if pin == inputs.patched else wheel
            for pin, wheel in zip(inputs.shipped, fetch(pins, cache, progress), strict=True)
        ]


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


def _wheel_files(
    inputs: _Inputs, wheels: list[Path], cache: Cache, progress: Progress
) -> tuple[dict[str, dict[str, Any]], dict[Rule, list[int]]]:
    """Path -> {"sha256", "size", "mode"} of what is kept and is then in the cache; rule -> [files, bytes] of the rest.

    Each wheel's RECORD is written anew for what is kept of it: packages find their libraries through it.
    """
    from .wheels import Member, installed, record_name, record_text, unpack

    files: dict[str, dict[str, Any]] = {}
    left_out: dict[Rule, list[int]] = {}
    kept: list[Member] = []
    packages = site_packages(inputs.lock.python)
    for wheel in wheels:
        own: list[Member] = []
        for member in installed(wheel):
            rule = left_out_by(member.path, inputs.choice.trim)
            if rule is None:
                own.append(member)
            else:
                count = left_out.setdefault(rule, [0, 0])
                count[:] = count[0] + 1, count[1] + member.size
        kept += own
        record = record_name(wheel)
        text = record_text(((member.path, member.sha256, member.size) for member in own), record)
        sha256, size = cache.add_blob([text])
        _add(files, f"{packages}/{record}", {"sha256": sha256, "size": size, "mode": 0o644})
    total, done = sum(member.size for member in kept), 0
    for member in unpack(kept, cache):
        path, mode = posixpath.normpath(f"{packages}/{member.path}"), 0o755 if member.executable else 0o644
        _add(files, path, {"sha256": member.sha256, "size": member.size, "mode": mode})
        done += member.size
        progress("building the release", done, total)
    return files, left_out


def _add(files: dict[str, dict[str, Any]], path: str, entry: dict[str, Any]) -> None:
    if files.setdefault(path, entry) != entry:
        raise Failed(f"two parts of the release have different files at {path}")


def _manifest(
    release: str, inputs: _Inputs, files: dict[str, dict[str, Any]], left_out: dict[Rule, list[int]]
) -> dict[str, Any]:
    from .repack import local_version

    target, patched = inputs.target, inputs.patched
    versions = {
        pin: local_version(pin.version, inputs.patchset) if pin == patched else pin.version
        for pin in inputs.choice.pins
    }
    return {
        "format": FORMAT,
        "id": release,
        "engine": target.engine,
        "base": target.base,
        "arch": target.arch,
        "slim": target.slim,
        "requires": inputs.requires,
        "wheels": target.wheels,
        "index_requirements": [
            {"name": pin.name, "version": pin.version, "hashes": [pin.sha256]}
            for pin in sorted(inputs.indexed, key=lambda pin: pin.name)
        ],
        "pins": sorted(f"{pin.name}=={version}" for pin, version in versions.items()),
        "patches": inputs.patchset.listing,
        "files": [{"path": path, **files[path]} for path in sorted(files)],
        "smoke": inputs.smoke,
        "left_out": _left_out(inputs, left_out),
        "total_size": sum(entry["size"] for entry in files.values()),
    }


def _left_out(inputs: _Inputs, counts: dict[Rule, list[int]]) -> list[dict[str, Any]]:
    """The manifest's list, the largest first, then the distributions, whose sizes nobody fetched."""
    told = [
        {"what": rule.what, "why": rule.why, "proven": rule.proven, "files": files, "bytes": size}
        for rule, (files, size) in sorted(counts.items(), key=lambda entry: (-entry[1][1], entry[0].what))
    ]
    return told + [
        {"what": rule.what, "why": rule.why, "proven": rule.proven, "files": None, "bytes": None}
        for rule in inputs.choice.dropped
    ]
