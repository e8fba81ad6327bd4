"""The few things that the patch workflow asks of git, independent of whoever's configuration."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import Failed

_WHO = "ddtree"
# The same for every tree that is made, so that two of them can be compared commit by commit.
_WHEN = "946684800 +0000"


@dataclass(frozen=True)
class Change:
    """One file's change in a commit. ``status``: A, M, D or T (type); modes as git writes them."""

    path: str
    status: str
    old_mode: str
    new_mode: str


class Git:
    """A repository. Methods raise Failed with what git said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, *arguments: str, stdin: bytes = b"") -> bytes:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
        for role in ("AUTHOR", "COMMITTER"):
            environment |= {
                f"GIT_{role}_NAME": _WHO,
                f"GIT_{role}_EMAIL": f"{_WHO}@localhost",
                f"GIT_{role}_DATE": _WHEN,
            }
        command = ["git", "-C", str(self.directory), "-c", "core.quotePath=false", *arguments]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, env=environment, check=False)
        except FileNotFoundError as error:
            raise Failed("git is not installed here") from error
        if done.returncode:
            raise Failed(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()[-500:]}")
        return done.stdout

    def init(self, *, attributes: str, ignored: str) -> None:
        """A new repository. ``attributes`` and ``ignored``: of gitattributes(5) and gitignore(5), not versioned."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.run("init", "--quiet", "--template=", "--object-format=sha1", "--initial-branch=patches")
        for key, value in (("core.autocrlf", "false"), ("core.fileMode", "true"), ("gc.auto", "0")):
            self.run("config", key, value)
        info = self.directory / ".git/info"
        info.mkdir()
        (info / "attributes").write_text(attributes)
        (info / "exclude").write_text(ignored)

    def commit_all(self, message: bytes) -> None:
        """Commits whatever is in the directory, with the message as it is."""
        self.run("add", "--all", "--force", ".")
        self.run(
            "commit", "--quiet", "--no-verify", "--allow-empty-message", "--cleanup=verbatim", "-F", "-", stdin=message
        )

    def dirt(self) -> list[str]:
        """Paths with changes that no commit has, new ones included."""
        return [line[3:] for line in self.run("status", "--porcelain", "-z", "-uall").decode().split("\0") if line]

    def history(self) -> list[str]:
        """Commit ids from the root to HEAD. Raises Failed for a merge: a series is a line."""
        lines = [line.split() for line in self.run("rev-list", "--reverse", "--parents", "HEAD").decode().splitlines()]
        if any(len(line) > 2 for line in lines) or sum(len(line) == 1 for line in lines) != 1:
            raise Failed(f"{self.directory}: the history has merges; rebase it to a line")
        return [line[0] for line in lines]

    def subjects(self) -> list[str]:
        """The first line of each message, the oldest first."""
        messages = (
            self.run("log", "--reverse", "-z", "--format=%B").decode(errors="replace").removesuffix("\0").split("\0")
        )
        return [message.strip().partition("\n")[0] for message in messages]

    def message(self, commit: str) -> bytes:
        """As it was given, to the byte."""
        return self.run("cat-file", "commit", commit).partition(b"\n\n")[2]

    def tree(self, commit: str) -> dict[str, tuple[str, str]]:
        """Path -> (mode, blob id)."""
        found = {}
        for entry in self.run("ls-tree", "-r", "-z", commit).decode().split("\0"):
            if entry:
                about, _, path = entry.partition("\t")
                mode, _, identity = about.split()
                found[path] = (mode, identity)
        return found

    def changes(self, commit: str) -> list[Change]:
        """What a commit changes against its parent."""
        words = self.run("diff-tree", "-r", "-z", "--raw", "--no-renames", f"{commit}^", commit).decode().split("\0")
        found = []
        for about, path in zip(words[0:-1:2], words[1::2], strict=True):
            old_mode, new_mode, _, _, status = about.removeprefix(":").split()
            found.append(Change(path, status, old_mode, new_mode))
        return found

    def content(self, commit: str, path: str) -> bytes:
        return self.run("cat-file", "blob", f"{commit}:{path}")

    def diff(self, commit: str, paths: list[str]) -> bytes:
        """The unified diff of a commit's changes of these paths: file names and hunks, nothing else."""
        options = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--text", "-U3", "--histogram")
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/")
        text = self.run("diff-tree", "-p", *options, *prefixes, f"{commit}^", commit, "--", *paths)
        lines = text.split(b"\n")
        return b"\n".join(line for line in lines if not line.startswith((b"diff --git ", b"index ")))


def blob_id(content: bytes) -> str:
    """git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
