"""The repository around a workspace, and whether a commit may be made there now. Reads only."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ddtree_ops.errors import Failed
from ddtree_ops.snapshot.git import GitError, git, line

_UNDER_WAY = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or git am",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisect",
    "sequencer": "a cherry-pick or revert of several commits",
}


@dataclass(frozen=True)
class Entry:
    """A tracked path: its mode ("100644") and object id."""

    mode: str
    blob: str


@dataclass(frozen=True)
class Repository:
    """``prefix``: the workspace's path inside it, "" or ending in /. ``head``: commit id, None before the first."""

    workspace: Path
    top: Path
    prefix: str
    git_dir: Path
    index: Path
    head: str | None

    def run(self, *arguments: str, stdin: bytes = b"", extra: dict[str, str] | None = None) -> bytes:
        return git(self.top, *arguments, stdin=stdin, extra=extra)

    def tree(self, paths: list[str]) -> dict[str, Entry]:
        """What HEAD has at and below ``paths`` (from the top), and at their parents where those are no directories."""
        if self.head is None:
            return {}
        parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents if str(parent) != "."}
        items = self._listed("ls-tree", "-r", "-z", self.head, "--", *sorted(paths))
        items += self._listed("ls-tree", "-z", self.head, "--", *sorted({*paths, *parents}))
        found: dict[str, Entry] = {}
        for item in items:
            head, path = item.split("\t", 1)
            mode, kind, blob = head.split(" ")
            if kind != "tree":
                found[path] = Entry(mode, blob)
        return found

    def staged(self, paths: list[str]) -> dict[str, Entry | None]:
        """What the user's index has there; None for an unmerged path."""
        found: dict[str, Entry | None] = {}
        for item in self._listed("ls-files", "-s", "-z", "--", *[f":(literal,top){path}" for path in paths]):
            head, path = item.split("\t", 1)
            mode, blob, stage = head.split(" ")
            found[path] = Entry(mode, blob) if stage == "0" else None
        return found

    def _listed(self, *arguments: str) -> list[str]:
        return [item for item in self.run(*arguments).decode(errors="surrogateescape").split("\0") if item]


def find(workspace: Path) -> Repository:
    """The repository that holds ``workspace``. Raises Failed when there is none, or git refuses it."""
    try:
        if line(workspace, "rev-parse", "--is-inside-work-tree") != "true":
            raise Failed(f"snapshot: {workspace} is inside a repository's own data, not its work tree")
        top, git_dir, index = (
            line(workspace, "rev-parse", "--path-format=absolute", *what)
            for what in (("--show-toplevel",), ("--git-dir",), ("--git-path", "index"))
        )
        prefix = line(workspace, "rev-parse", "--show-prefix")
    except GitError as error:
        if "not a git repository" in error.said:
            hint = f"git -C {workspace} init, then commit the inventories"
            raise Failed(f"snapshot: {workspace} is not in a git repository", hint=hint) from error
        raise Failed(f"snapshot: {error}") from error
    try:
        head: str | None = line(workspace, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    except GitError:
        head = None
    return Repository(workspace, Path(top), prefix, Path(git_dir), Path(index), head)


def check_may_commit(repository: Repository) -> None:
    """Raises Failed where a commit would disturb what is under way, belong to nobody, or to no branch."""
    for name, what in _UNDER_WAY.items():
        if (repository.git_dir / name).exists():
            raise Failed(
                f"snapshot: {what} is in progress in {repository.top}; nothing was committed",
                hint="finish or abort it (git status says how), then ddtree snapshot again",
            )
    try:
        line(repository.top, "symbolic-ref", "--quiet", "HEAD")
    except GitError as error:
        raise Failed(
            f"snapshot: HEAD of {repository.top} is detached: a commit would belong to no branch",
            hint="git switch BRANCH, then ddtree snapshot again",
        ) from error
    for who in ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT"):
        try:
            # Without this git makes up an address from the host's name.
            line(repository.top, "-c", "user.useConfigOnly=true", "var", who)
        except GitError as error:
            raise Failed(
                f"snapshot: git does not know who commits in {repository.top}; nothing was committed",
                hint="git config user.name NAME; git config user.email ADDRESS",
            ) from error


def check_plain(repository: Repository, paths: list[str], tracked: dict[str, Entry]) -> None:
    """Raises Failed where a symlink, a submodule or a file stands on the way to a path, in HEAD or on disk."""
    for path in paths:
        for parent in reversed([p for p in PurePosixPath(path).parents if str(p) != "."]):
            entry = tracked.get(str(parent))
            if entry is not None:
                raise Failed(f"snapshot: {parent} is tracked as something else than a directory (mode {entry.mode})")
            _check_on_disk(repository, str(parent), directory=True)
        entry = tracked.get(path)
        if entry is not None and entry.mode not in ("100644", "100755"):
            raise Failed(f"snapshot: {path} is tracked as a symlink or submodule (mode {entry.mode})")
        _check_on_disk(repository, path, directory=False)


def _check_on_disk(repository: Repository, path: str, *, directory: bool) -> None:
    try:
        mode = (repository.top / path).lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise Failed(f"snapshot: {path}: {error.strerror}") from error
    if not (stat.S_ISDIR(mode) if directory else stat.S_ISREG(mode)):
        what = "a symlink" if stat.S_ISLNK(mode) else f"not a {'directory' if directory else 'plain file'}"
        raise Failed(f"snapshot: {repository.top / path} is {what}; nothing was written", hint="move it away")
