"""From the git tree of ``patch edit`` back to ``patches/<base>/``. What says the same as before stays byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import Failed
from .git import Change, Git
from .patchset import Patch, PatchSet, apply_patch, load_patchset, series
from .udiff import plain_path
from .workflow import Stock, is_stock, patch_name


@dataclass(frozen=True)
class Refreshed:
    """File names below ``patches/<base>/``."""

    written: tuple[str, ...]
    removed: tuple[str, ...]


def refresh(wheel: Stock, directory: Path, tree: Path) -> Refreshed:
    """Writes series, patches and overlay as the tree's commits say; nothing unless all of it can be said.

    A commit's changes of stock files become its patch; all other files become the overlay, as they are at the end.
    Raises Failed for what a series cannot say: uncommitted work, merges, a stock file deleted or with another mode.
    """
    git = Git(tree)
    if dirt := git.dirt():
        raise Failed(f"{tree}: not committed: {', '.join(dirt[:5])}", hint="commit it (or git commit --amend) first")
    first, *commits = git.history()
    if not is_stock(git, first, wheel):
        raise Failed(f"{tree}: its first commit is not {wheel.name}", hint="make a tree with: ddtree patch edit")
    before = load_patchset(directory)
    old = {patch.name: patch for patch in before.patches}
    patches: dict[str, Patch] = {}
    for number, commit in enumerate(commits, 1):
        paths = [change.path for change in git.changes(commit) if _is_of_stock(change, wheel, number)]
        if paths:
            header, name = patch_name(git.message(commit), number, patches.__contains__)
            patches[name] = _patch(git, commit, name, header, paths, old.get(name))
    overlay = {path: git.content("HEAD", path) for path in git.tree("HEAD") if path not in wheel.files}
    return _write(directory, before, PatchSet(tuple(patches.values()), overlay))


def _is_of_stock(change: Change, wheel: Stock, number: int) -> bool:
    where = f"commit {number}: {change.path}"
    if not plain_path(change.path) or any(part.startswith(".") for part in change.path.split("/")):
        raise Failed(f"{where}: refused the name")
    if change.path in wheel.files:
        if change.status != "M" or change.old_mode != change.new_mode:
            raise Failed(f"{where}: a patch changes the text of a stock file and nothing else")
        return True
    if change.new_mode not in ("100644", "000000"):
        raise Failed(f"{where}: has mode {change.new_mode}; files of the overlay are plain")
    return False


def _patch(git: Git, commit: str, name: str, header: bytes, paths: list[str], old: Patch | None) -> Patch:
    """The patch as it was when it still does the same, else a new one."""
    parents = {path: git.content(f"{commit}^", path) for path in paths}
    wanted = {path: git.content(commit, path) for path in paths}
    if old is not None and old.header == header and _does(old, parents, wanted):
        return old
    if binary := [path for path in paths if b"\0" in parents[path] + wanted[path]]:
        raise Failed(f"{name}: {binary[0]} is a binary file")
    made = Patch(name, header + git.diff(commit, paths))
    if not _does(made, parents, wanted) or made.header != header:
        raise Failed(f"{name}: its header has a line that reads as a diff's first", hint="change the commit's message")
    return made


def _does(patch: Patch, parents: dict[str, bytes], wanted: dict[str, bytes]) -> bool:
    try:
        return apply_patch(patch, parents.get) == wanted
    except Failed:
        return False


def _write(directory: Path, before: PatchSet, after: PatchSet) -> Refreshed:
    old = {f"overlay/{path}": content for path, content in before.overlay.items()}
    old |= {patch.name: patch.data for patch in before.patches}
    new = {f"overlay/{path}": content for path, content in after.overlay.items()}
    new |= {patch.name: patch.data for patch in after.patches}
    text = _series(directory, [patch.name for patch in after.patches])
    if text is not None:
        new["series"] = text
    written = sorted(name for name, content in new.items() if old.get(name) != content)
    removed = sorted(old.keys() - new.keys())
    if shared := [name for name in removed if not (directory / name).is_file()]:
        raise Failed(f"{shared[0]} is of the overlay that {directory / 'overlay-of'} names; it cannot be left out here")
    for name in written:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(new[name])
    for name in removed:
        (directory / name).unlink()
        for parent in (directory / name).parents:
            if parent == directory or any(parent.iterdir()):
                break
            parent.rmdir()
    return Refreshed(tuple(written), tuple(removed))


def _series(directory: Path, names: list[str]) -> bytes | None:
    """The new text; None where it names these already. Comments stay at the top, or with the patch below them."""
    path = directory / "series"
    if path.is_file() and series(directory) == names:
        return None
    head: list[str] = []
    blocks: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        name = line.partition("#")[0].strip()
        if not name:
            waiting.append(line)
        else:
            if not blocks:
                head, waiting = waiting, []
            blocks[name] = [*waiting, line]
            waiting = []
    if not blocks:
        head, waiting = waiting, []
    lines = [line for name in names for line in blocks.get(name, [name])]
    return "".join(f"{line}\n" for line in [*head, *lines, *waiting]).encode()
