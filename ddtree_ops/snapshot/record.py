"""One commit of a snapshot's own paths, with everything else of the user's left exactly as it was.

The commit is made from HEAD's tree by plumbing, in an index of its own, so whatever is staged, changed or untracked
takes no part. Then HEAD's branch moves (compare and swap), and the user's index and work tree follow at those
snapshot paths that were as HEAD had them; a path the user had staged or edited keeps what the user made of it.
The user's index is replaced under git's own lock (``index.lock``), so git and two snapshots at once keep apart.

Hooks are not run: they judge or rewrite the user's staged work, and this commit has none. It is not signed: a signer
may ask for a passphrase. A rebase, merge, cherry-pick, revert or bisect in progress and a detached HEAD are refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.snapshot.git import GitError
from ddtree_ops.snapshot.repository import Entry, Repository, check_may_commit, check_plain, find

LOCK_PATIENCE_S = 5.0
MODE = "100644"
_PATH = re.compile(r"(?P<top>snapshots/[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*)(?:/[A-Za-z0-9_][A-Za-z0-9._-]*){1,2}")


def stored(workspace: Path, new: Mapping[str, str]) -> dict[str, str]:
    """The last committed snapshot of the services in ``new``: path below the workspace -> text; {} if there is none.

    Raises Failed where ``workspace`` is not in a git repository.
    """
    repository = find(workspace)
    tops = [repository.prefix + top for top in _tops(new)]
    kept = {path: e for path, e in repository.tree(tops).items() if e.mode in (MODE, "100755") and _below(path, tops)}
    return {
        path.removeprefix(repository.prefix): repository.run("cat-file", "blob", entry.blob).decode(errors="replace")
        for path, entry in kept.items()
    }


def commit(workspace: Path, files_by_path: Mapping[str, str], message: str) -> str | None:
    """Makes HEAD hold exactly ``files_by_path`` below their ``snapshots/<host>/<service>/``; the commit's id.

    None, and no write to any file or ref, when HEAD holds them already. Raises UsageError for other paths; Failed,
    with nothing committed and nothing lost, for whatever stands in the way.
    """
    tops = _tops(files_by_path)
    repository = find(workspace)
    check_may_commit(repository)
    try:
        with _index_lock(repository) as lock:
            # HEAD may have moved while another snapshot held the lock.
            return _commit(find(workspace), lock, tops, files_by_path, message)
    except GitError as error:
        raise Failed(f"snapshot: {error}; nothing was committed") from error
    except OSError as error:
        raise Failed(
            f"snapshot: {error.filename or repository.top}: {error.strerror}; nothing was committed"
        ) from error


def _commit(
    repository: Repository, lock: Path, tops: list[str], files_by_path: Mapping[str, str], message: str
) -> str | None:
    tops = [repository.prefix + top for top in tops]
    wanted = {repository.prefix + path: text.encode() for path, text in files_by_path.items()}
    tracked = repository.tree(sorted({*tops, *wanted}))
    check_plain(repository, sorted(wanted), tracked)
    before = {path: entry for path, entry in tracked.items() if _below(path, tops)}
    after = {path: Entry(MODE, _write_blob(repository, content)) for path, content in wanted.items()}
    if before == after:
        return None
    differing = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    changes = {path: after.get(path) for path in sorted(differing)}
    made = _make_commit(repository, changes, message)
    _write_index(repository, lock, _followed(changes, before, repository.staged(list(changes))))
    with _prepared(repository, {path: wanted.get(path) for path in changes}, before) as replacements:
        # An empty old value means: the branch must not exist yet.
        repository.run("update-ref", "-m", f"commit: {message.splitlines()[0]}", "HEAD", made, repository.head or "")
        try:
            if lock.stat().st_size:
                lock.rename(repository.index)
            for temporary, target in replacements:
                if temporary is None:
                    target.unlink()
                else:
                    temporary.rename(target)
        except OSError as error:
            message = f"snapshot: committed {made[:12]}, but the files beside it could not follow: {error}"
            raise Failed(message, hint=f"git -C {repository.top} restore -SW -- {' '.join(tops)}") from error
    return made


def _followed(
    changes: Mapping[str, Entry | None], before: Mapping[str, Entry], staged: Mapping[str, Entry | None]
) -> dict[str, Entry | None]:
    """The changes that the user's index takes over: where it was as HEAD. What was staged or is unmerged stays."""
    return {
        path: entry
        for path, entry in changes.items()
        if (staged[path] is not None and staged[path] == before.get(path) if path in staged else path not in before)
    }


def _tops(files_by_path: Mapping[str, str]) -> list[str]:
    tops = set()
    for path in files_by_path:
        match = _PATH.fullmatch(path)
        if match is None:
            raise UsageError(f"snapshot: {path!r} is not a path of a snapshot")
        tops.add(match["top"])
    if not tops:
        raise UsageError("snapshot: no files")
    return sorted(tops)


def _below(path: str, tops: list[str]) -> bool:
    return any(path.startswith(top + "/") for top in tops)


def _write_blob(repository: Repository, content: bytes) -> str:
    return repository.run("hash-object", "-w", "--stdin", stdin=content).decode().strip()


def _index_info(changes: Mapping[str, Entry | None], id_length: int) -> bytes:
    """Input of `git update-index -z --index-info`; mode 0 removes a path."""
    lines = []
    for path, entry in sorted(changes.items()):
        lines.append(f"{entry.mode} {entry.blob}\t{path}" if entry else f"0 {'0' * id_length}\t{path}")
    return "".join(f"{item}\0" for item in lines).encode(errors="surrogateescape")


def _make_commit(repository: Repository, changes: Mapping[str, Entry | None], message: str) -> str:
    """The commit object on top of HEAD; no ref points to it yet."""
    length = len(
        next(entry.blob for entry in changes.values() if entry) if any(changes.values()) else repository.head or ""
    )
    with _scratch(repository) as index:
        extra = {"GIT_INDEX_FILE": str(index)}
        repository.run("read-tree", *([repository.head] if repository.head else ["--empty"]), extra=extra)
        repository.run("update-index", "-z", "--index-info", stdin=_index_info(changes, length), extra=extra)
        tree = repository.run("write-tree", extra=extra).decode().strip()
    parents = ["-p", repository.head] if repository.head else []
    return repository.run("commit-tree", tree, *parents, "-F", "-", stdin=message.encode()).decode().strip()


def _write_index(repository: Repository, lock: Path, follow: Mapping[str, Entry | None]) -> None:
    """Fills ``lock`` with the user's index as it is to be; leaves it empty where the index stays as it is."""
    if not follow:
        return
    length = len(next((entry.blob for entry in follow.values() if entry), repository.head or ""))
    with _scratch(repository) as index:
        if repository.index.exists():
            index.write_bytes(repository.index.read_bytes())
        info = _index_info(follow, length)
        repository.run("update-index", "-z", "--index-info", stdin=info, extra={"GIT_INDEX_FILE": str(index)})
        with lock.open("wb") as file:
            file.write(index.read_bytes())
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _scratch(repository: Repository) -> Iterator[Path]:
    """A path for an index of our own, beside the user's (a split index is found from there)."""
    index = repository.git_dir / f"ddtree-index-{secrets.token_hex(8)}"
    try:
        yield index
    finally:
        index.unlink(missing_ok=True)
        index.with_name(index.name + ".lock").unlink(missing_ok=True)


@contextlib.contextmanager
def _index_lock(repository: Repository) -> Iterator[Path]:
    """git's own lock on the user's index, held empty. Waits for it a little: git and other snapshots are quick."""
    lock = repository.index.with_name(repository.index.name + ".lock")
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            break
        except FileExistsError as error:
            if time.monotonic() >= deadline:
                raise Failed(
                    f"snapshot: {lock} exists: another git works there, or one crashed; nothing was committed",
                    hint=f"when no git runs there any more: rm {lock}",
                ) from error
            time.sleep(0.05)
    os.close(descriptor)
    mine = lock.stat().st_ino
    try:
        yield lock
    finally:
        # Once renamed over the index the name is free again, and may be another's.
        with contextlib.suppress(FileNotFoundError):
            if lock.stat().st_ino == mine:
                lock.unlink()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _prepared(
    repository: Repository, contents: Mapping[str, bytes | None], before: Mapping[str, Entry]
) -> Iterator[list[tuple[Path | None, Path]]]:
    """(temporary file or None to remove, target) for every path whose file is as HEAD has it; written, not yet moved.

    What cannot be written is found out here, before anything is committed. Directories made in vain are removed.
    """
    ready: list[tuple[Path | None, Path]] = []
    directories: list[Path] = []
    try:
        for path, content in sorted(contents.items()):
            target = repository.top / path
            if content is not None:
                for parent in reversed([p for p in target.parents if repository.top in p.parents and not p.exists()]):
                    parent.mkdir()
                    directories.append(parent)
            old = before.get(path)
            present = _read(target)
            known = repository.run("cat-file", "blob", old.blob) if old else None
            if present != known or present == content:
                continue
            if not os.access(target.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target.parent))
            temporary = None if content is None else target.with_name(f".ddtree-{secrets.token_hex(6)}")
            ready.append((temporary, target))
            if temporary is not None and content is not None:
                temporary.write_bytes(content)
        yield ready
    finally:
        for left, _ in ready:
            if left is not None:
                left.unlink(missing_ok=True)
        for directory in reversed(directories):
            with contextlib.suppress(OSError):
                directory.rmdir()
