"""Work on ``patches/<base>/``: is it sound, and its way into a git tree and back.

In the tree commit 0 is the stock wheel, then comes one commit a patch with the header as its message, the overlay last.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import Failed
from .cache import Cache
from .fetch import fetch
from .git import Git, blob_id
from .lock import Lock, load_lock, locked_pythons, normal
from .patchset import PatchSet, apply_patch, load_patchset
from .progress import Progress
from .wheels import members

#: The line that keeps a patch's file name in its commit's message.
TRAILER = "Patch-File: "
IGNORED = "__pycache__/\n*.pyc\n.ruff_cache/\n.mypy_cache/\n.pytest_cache/\n"
# Nothing in the wheel or on this machine may change what git stores.
ATTRIBUTES = "* -text -eol -ident -filter -working-tree-encoding\n"


@dataclass(frozen=True)
class Stock:
    """The wheel that the patches are for: path below site-packages -> content, and which are executable."""

    name: str
    files: dict[str, bytes]
    programs: frozenset[str]


def stock(base: str, python: str, cache: Cache, progress: Progress = lambda what, done, total: None) -> Stock:
    """Fetched where it is not in the cache, each file checked. Raises Failed as `fetch` and `members` do."""
    return read_stock(_patched_wheel(load_lock(base, python), cache, progress))


def _patched_wheel(lock: Lock, cache: Cache, progress: Progress) -> Path:
    name = normal((lock.resolve or "").partition("==")[0])
    pins = tuple(pin for pin in lock.pins if pin.name == name)
    if len(pins) != 1:
        raise Failed("nothing is patched here: the lock does not say '# resolve: NAME==VERSION'")
    return fetch(replace(lock, pins=pins), cache, progress)[0]


def read_stock(wheel: Path) -> Stock:
    """All that a wheel installs below site-packages, but RECORD."""
    found = members(wheel)
    with zipfile.ZipFile(wheel) as archive:
        files = {member.path: archive.read(member.name) for member in found}
    if hidden := sorted(path for path in files if ".git" in path.split("/")):
        raise Failed(f"{wheel.name}: refused the name {hidden[0]!r}")
    programs = frozenset(member.path for member in found if member.executable)
    return Stock(wheel.name, files, programs)


def check(base: str, directory: Path, cache: Cache, progress: Progress = lambda what, done, total: None) -> list[str]:
    """What is wrong with a series: it does not apply to each locked Python's wheel, headers lack something, the result
    does not compile, the overlay does not lint. Empty when all is well."""
    try:
        patchset = load_patchset(directory)
    except Failed as error:
        return [error.message]
    faults = [fault for patch in patchset.patches for fault in patch.faults]
    for python in locked_pythons(base):
        found = applied(patchset, stock(base, python, cache, progress))
        faults += [fault for fault in found if fault not in faults]
    return faults + _lint(directory / "overlay")


def applied(patchset: PatchSet, wheel: Stock) -> list[str]:
    """Faults of a series over one wheel; it is compiled by the Python that runs this."""
    try:
        changed = patchset.apply(wheel.files.get)
    except Failed as error:
        return [f"{error.message} ({wheel.name})"]
    faults = []
    for path, content in changed.items():
        if path.endswith(".py"):
            try:
                compile(content, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
                faults.append(f"{path} does not compile with {version}: {error}")
    return faults


def _lint(overlay: Path) -> list[str]:
    """What ruff says, where there is a ruff."""
    beside = Path(sys.executable).with_name("ruff")
    ruff = str(beside) if beside.is_file() else shutil.which("ruff")
    if ruff is None or not overlay.is_dir():
        return []
    command = [ruff, "check", "--quiet", "--no-cache", "--output-format", "concise", str(overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise Failed(f"ruff: {done.stderr.strip()[-500:]}")
    return [line for line in done.stdout.splitlines() if line]


def edit(wheel: Stock, patchset: PatchSet, tree: Path) -> list[str]:
    """Makes the tree in an absent or empty directory; returns the commits' subjects, the oldest first.

    Raises Failed when the directory has something, or a patch does not fit exactly (then nothing stays).
    """
    if tree.exists() and (not tree.is_dir() or any(tree.iterdir())):
        raise Failed(f"{tree}: is there already", hint="name another directory, or: ddtree patch refresh that")
    patchset.apply(wheel.files.get)
    git = Git(tree)
    try:
        git.init(attributes=ATTRIBUTES, ignored=IGNORED)
        _write(tree, wheel.files, wheel.programs)
        git.commit_all(f"stock: {wheel.name}\n".encode())
        for patch in patchset.patches:
            _write(tree, apply_patch(patch, lambda path: (tree / path).read_bytes()))
            git.commit_all(patch.header + f"{TRAILER}{patch.name}\n".encode())
        if patchset.overlay:
            _write(tree, patchset.overlay)
            git.commit_all(b"overlay: new files\n")
    except BaseException:
        shutil.rmtree(tree, ignore_errors=True)
        raise
    return git.subjects()


def _write(tree: Path, files: dict[str, bytes], programs: frozenset[str] = frozenset()) -> None:
    for path, content in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        new = not (tree / path).exists()
        (tree / path).write_bytes(content)
        if new:
            (tree / path).chmod(0o755 if path in programs else 0o644)


def is_stock(git: Git, commit: str, wheel: Stock) -> bool:
    """Whether a commit's tree is the wheel, byte for byte."""
    want = {
        path: ("100755" if path in wheel.programs else "100644", blob_id(content))
        for path, content in wheel.files.items()
    }
    return git.tree(commit) == want


def patch_name(message: bytes, number: int, taken: Callable[[str], bool]) -> tuple[bytes, str]:
    """(header, file name) of a commit: the name that the trailer keeps, else one made of the first line."""
    lines = message.splitlines(keepends=True)
    marks = [line for line in lines if line.startswith(TRAILER.encode())]
    header = b"".join(line for line in lines if line not in marks)
    if len(marks) == 1:
        name = marks[0][len(TRAILER) :].decode(errors="replace").strip()
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.patch", name) and not taken(name):
            return header, name
        raise Failed(f"the message of commit {number} names the patch {name!r}, which is no name or another's")
    if marks:
        raise Failed(f"the message of commit {number} names two patches: squashed? keep one '{TRAILER}' line")
    first = header.decode(errors="replace").strip().partition("\n")[0].removeprefix("Why:").removeprefix("What:")
    slug = re.sub(r"[^a-z0-9]+", "-", first.lower()).strip("-")[:48] or "change"
    names = (f"{number:04d}-{slug}{suffix}.patch" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return header, next(name for name in names if not taken(name))
