"""git as a subprocess: its plumbing, without prompts, pagers, translations or hooks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ddtree_ops.errors import Failed

TIMEOUT_S = 60
# Set by git for its hooks and aliases; they would point a call at another repository or index than the workspace's.
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
_OPTIONS = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")


class GitError(Exception):
    """git answered with an error; ``said`` is its stderr."""

    def __init__(self, command: str, said: str) -> None:
        super().__init__(f"git {command}: {said}")
        self.said = said


def git(directory: Path, *arguments: str, stdin: bytes = b"", extra: Mapping[str, str] | None = None) -> bytes:
    """stdout of ``git arguments`` run in ``directory``. Raises GitError; Failed without git or when it hangs."""
    env = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
    env |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "GIT_OPTIONAL_LOCKS": "0", **(extra or {})}
    try:
        done = subprocess.run(
            ["git", *_OPTIONS, *arguments], cwd=directory, input=stdin, capture_output=True, timeout=TIMEOUT_S, env=env
        )
    except FileNotFoundError as error:
        missing = directory if not directory.is_dir() else "git"
        raise Failed(f"snapshot: {missing} is not there", hint="install git, or name another workspace") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"snapshot: git {arguments[0]} did not end within {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise GitError(arguments[0], done.stderr.decode(errors="replace").strip())
    return done.stdout


def line(directory: Path, *arguments: str, extra: Mapping[str, str] | None = None) -> str:
    """The one line that ``git arguments`` prints."""
    return git(directory, *arguments, extra=extra).decode(errors="surrogateescape").removesuffix("\n")
