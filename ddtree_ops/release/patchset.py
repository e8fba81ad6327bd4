"""``patches/<base>/``: a series of strict patches and an overlay of new files, over one wheel.

``series``: a patch's file name a line, ``#`` comments. A patch: header text, then a unified diff whose paths are
relative to site-packages. ``overlay/``: new files, relative to site-packages too. ``overlay-of`` (optional): the name
of another base, whose overlay this one has as well; a file of its own stands in the other's place. ``smoke``
(optional): what the host tries of a patched engine, a line each: ``import NAME``, ``algorithm NAME``, ``flag --name``.
``untried`` (optional): why a release of this base should not serve yet, in words for an operator.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import Failed
from .udiff import FileDiff, apply_diff, parse_diff, plain_path, split_patch

#: What the header of each patch says: why it is, what it does, which tests cover it, what upstream does about it.
FIELDS = ("Why", "What", "Tests", "Upstream")
_FIELD = re.compile(r"^(Why|What|Tests|Upstream):[ \t]*(.*)$", re.MULTILINE)
_PATCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.patch")
_BASE_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_SMOKE = re.compile(r"import [A-Za-z_][A-Za-z0-9_.]*|algorithm [A-Z0-9_]+|flag --[a-z0-9-]+")


@dataclass(frozen=True)
class Patch:
    """One file of the series."""

    name: str
    data: bytes

    @property
    def header(self) -> bytes:
        return split_patch(self.data)[0]

    @property
    def diffs(self) -> tuple[FileDiff, ...]:
        """Raises Failed for a diff that is not plainly one."""
        diffs = parse_diff(split_patch(self.data)[1], self.name)
        if not diffs:
            raise Failed(f"{self.name}: there is no diff in it")
        return diffs

    @property
    def faults(self) -> list[str]:
        """What its header lacks; empty when it is complete."""
        try:
            text = self.header.decode()
        except UnicodeDecodeError as error:
            return [f"{self.name}: the header is not UTF-8: {error}"]
        found = [name for name, _ in _FIELD.findall(text)]
        starts = [match.start() for match in _FIELD.finditer(text)] + [len(text)]
        empty = [
            text[start:].partition(":")[0]
            for start, end in itertools.pairwise(starts)
            if not text[start:end].partition(":")[2].strip()
        ]
        return [
            *(f"{self.name}: the header lacks '{name}:'" for name in FIELDS if name not in found),
            *(f"{self.name}: the header has '{name}:' twice" for name in FIELDS if found.count(name) > 1),
            *(f"{self.name}: '{name}:' says nothing" for name in empty),
        ]


@dataclass(frozen=True)
class PatchSet:
    """All that makes a stock wheel ours. Without patches and overlay it is the stock wheel."""

    patches: tuple[Patch, ...] = ()
    overlay: dict[str, bytes] = field(default_factory=dict)
    smoke: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.patches or self.overlay)

    @property
    def listing(self) -> list[dict[str, str]]:
        """[{"name", "sha256"}] in the order of application, the overlay first."""
        named = [(f"overlay/{path}", content) for path, content in sorted(self.overlay.items())]
        named += [(patch.name, patch.data) for patch in self.patches]
        return [{"name": name, "sha256": hashlib.sha256(content).hexdigest()} for name, content in named]

    @property
    def hash8(self) -> str:
        """Of the local version: 8 hex digits over all names, contents and their order."""
        return hashlib.sha256(json.dumps(self.listing, sort_keys=True).encode()).hexdigest()[:8]

    def apply(self, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
        """Path -> content of every file that is new or changed. ``read`` gives a stock file, None where there is none.

        Raises Failed naming patch, file and hunk when anything does not fit exactly.
        """
        for path in self.overlay:
            if read(path) is not None:
                raise Failed(f"overlay/{path}: the wheel has this file; change it by a patch")
        changed: dict[str, bytes] = {}
        for patch in self.patches:
            for path, content in apply_patch(patch, lambda path: changed.get(path, read(path)), self.overlay).items():
                changed[path] = content
        return {**self.overlay, **changed}


def apply_patch(
    patch: Patch, read: Callable[[str], bytes | None], overlay: dict[str, bytes] | None = None
) -> dict[str, bytes]:
    """Path -> content of what one patch changes. Raises Failed as `PatchSet.apply` does."""
    changed = {}
    for diff in patch.diffs:
        if overlay and diff.path in overlay:
            raise Failed(f"{patch.name}: {diff.path} is a file of the overlay; change it there")
        content = read(diff.path)
        if content is None:
            raise Failed(f"{patch.name}: {diff.path}: the wheel has no such file")
        changed[diff.path] = apply_diff(diff, content, patch.name)
    return changed


def load_patchset(directory: Path) -> PatchSet:
    """What ``patches/<base>/`` holds; empty where there is no such directory.

    Raises Failed for a file that the series does not name, a name that leads elsewhere, a link.
    """
    if not directory.is_dir():
        return PatchSet()
    names = series(directory)
    there = {path.name for path in directory.glob("*.patch")}
    if spare := sorted(there - set(names)):
        raise Failed(f"{directory / 'series'}: does not name {', '.join(spare)}")
    patches = tuple(Patch(name, _plain_file(directory / name)) for name in names)
    overlay = {**shared_overlay(directory), **_overlay(directory / "overlay")}
    return PatchSet(patches, overlay, _smoke(directory / "smoke"))


def shared_overlay(directory: Path) -> dict[str, bytes]:
    """The files of the overlay that ``overlay-of`` names. Raises Failed where there is none, or it shares another's."""
    path = directory / "overlay-of"
    if not path.exists() and not path.is_symlink():
        return {}
    name = _plain_file(path).decode().strip()
    other = directory.parent / name
    if not _BASE_NAME.fullmatch(name) or other == directory or not (other / "overlay").is_dir():
        raise Failed(f"{path}: there is no overlay of {name!r} beside it")
    if (other / "overlay-of").exists():
        raise Failed(f"{path}: {name} has its overlay of another")
    return _overlay(other / "overlay")


def untried(directory: Path) -> str | None:
    """Why no release of this base should serve yet; None where nothing is said against it."""
    path = directory / "untried"
    return _plain_file(path).decode().strip() if path.exists() else None


def series(directory: Path) -> list[str]:
    """The patches' file names in order. Raises Failed for what is none."""
    path = directory / "series"
    if not path.is_file():
        return []
    names: list[str] = []
    for number, line in enumerate(_plain_file(path).decode().splitlines(), 1):
        name = line.partition("#")[0].strip()
        if name and (not _PATCH_NAME.fullmatch(name) or name in names):
            raise Failed(f"{path}: line {number}: {name!r} is {'there twice' if name in names else 'no NAME.patch'}")
        if name:
            names.append(name)
    return names


def _plain_file(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise Failed(f"{path}: {'is a link' if path.is_symlink() else 'there is no such file'}")
    return path.read_bytes()


def _overlay(directory: Path) -> dict[str, bytes]:
    """Caches of Python and of linters (``__pycache__``, hidden names) are no part of it."""
    found: dict[str, bytes] = {}
    if directory.is_symlink():
        raise Failed(f"{directory}: is a link")
    for base, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if name != "__pycache__" and not name.startswith("."))
        for name in directories:
            if (Path(base) / name).is_symlink():
                raise Failed(f"{Path(base) / name}: is a link")
        for name in sorted(name for name in names if not name.startswith(".")):
            path = (Path(base) / name).relative_to(directory).as_posix()
            if not plain_path(path):
                raise Failed(f"{directory}: refused the name {path!r}")
            found[path] = _plain_file(Path(base) / name)
    return found


def _smoke(path: Path) -> tuple[str, ...]:
    lines = _plain_file(path).decode().splitlines() if path.exists() or path.is_symlink() else []
    told = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for line in told:
        if not _SMOKE.fullmatch(line):
            raise Failed(f"{path}: {line!r} is none of: import NAME, algorithm NAME, flag --name")
    return tuple(told)
