"""Files that options name: what is refused, and that nobody's link is followed or replaced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ddtree_ops.cli.output import write_whole
from ddtree_ops.errors import UsageError

from .test_cli import ddtree, workspace  # noqa: F401  a fixture


@pytest.mark.parametrize("words", [["doctor", "--save"], ["plan", "-o"], ["hosts", "--prometheus"]])
@pytest.mark.parametrize("name", ["no/such/file", "inventories", "", "/", "link", "pipe"])
def test_what_is_no_ordinary_file_is_refused_before_anything_is_contacted(
    workspace: Path,  # noqa: F811
    words: list[str],
    name: str,
) -> None:
    (workspace / "link").symlink_to(workspace / "victim")
    os.mkfifo(workspace / "pipe")
    before = sorted(workspace.iterdir())
    done = ddtree(workspace, *words, name)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: --"), done.stderr
    assert sorted(workspace.iterdir()) == before and (workspace / "link").is_symlink()


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".it.part").symlink_to(victim)
    write_whole(tmp_path / "it", "new", "--save")
    assert victim.read_text() == "precious" and (tmp_path / "it").read_text() == "new"
    (tmp_path / "there").symlink_to(victim)
    with pytest.raises(UsageError, match="not an ordinary file"):
        write_whole(tmp_path / "there", "new", "--save")


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    texts = [str(digit) * 200_000 for digit in range(4)]
    writers = [threading.Thread(target=write_whole, args=(tmp_path / "it", text, "-o")) for text in texts for _ in "ab"]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert (tmp_path / "it").read_text() in texts
    assert list(tmp_path.iterdir()) == [tmp_path / "it"]


def test_a_plan_that_was_not_written_is_said(workspace: Path) -> None:  # noqa: F811
    """Given a host that cannot be looked at, an older file stays, and nobody may take it for the new one."""
    (workspace / "old.plan").write_text("old")
    done = ddtree(workspace, "plan", "--host", "local", "--host", "b300", "-o", "old.plan")
    assert done.returncode == 6 and "no plan was written to old.plan" in done.stderr
    assert (workspace / "old.plan").read_text() == "old"
