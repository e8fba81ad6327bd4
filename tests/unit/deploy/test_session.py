"""Whose history a workspace has: asked of git itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddtree_ops.deploy.session import author, is_ancestor


class Repository:
    """A git repository with a commit for every call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.net")
        done = subprocess.run(["git", *who, *words], cwd=self.path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_earlier_commits_and_this_one_are_in_the_history(repository: Repository) -> None:
    first, last = repository.commit(), repository.commit()
    assert author(repository.path)["workspace_commit"] == last
    assert is_ancestor(repository.path, first) and is_ancestor(repository.path, last)


def test_another_branch_and_an_unknown_commit_are_not(repository: Repository) -> None:
    first = repository.commit()
    repository.git("checkout", "-q", "-b", "aside")
    aside = repository.commit()
    repository.git("checkout", "-q", "main")
    assert not is_ancestor(repository.path, aside)
    assert not is_ancestor(repository.path, "f" * 40)
    assert not is_ancestor(repository.path, "--all")
    repository.git("reset", "-q", "--hard", first)
    repository.git("checkout", "-q", "aside")
    assert is_ancestor(repository.path, first)


def test_without_git_nothing_is_in_the_history(tmp_path: Path) -> None:
    assert author(tmp_path)["workspace_commit"] is None
    assert not is_ancestor(tmp_path, "f" * 40)
