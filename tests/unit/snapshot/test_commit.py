"""Snapshot commits with real git in temporary repositories: what they add, and what they must leave alone."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.snapshot import commit, stored

TOP = "snapshots/ct200/svc"
FILES = {
    f"{TOP}/unit.service": "[Unit]\nA=1\n",
    f"{TOP}/dropins/a.conf": "x\n",
    f"{TOP}/server-args.json": '{"b": 1}\n',
}


def git(where: Path, *arguments: str, **more: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, env={**os.environ, **more})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def own_git_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of the machine's or the user's takes part."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    top = tmp_path / "work"
    top.mkdir()
    git(top, "init", "-q", "-b", "main")
    git(top, "config", "user.name", "A User")
    git(top, "config", "user.email", "user@example.org")
    for name in ("kept", "staged", "edited", "both", "deleted"):
        (top / name).write_text(f"{name}\n")
    git(top, "add", ".")
    git(top, "commit", "-qm", "first")
    return top


def test_the_files_are_committed_and_lie_in_the_work_tree(repo: Path) -> None:
    made = commit(repo, FILES, "ct200: svc first snapshot\n")
    assert made == git(repo, "rev-parse", "main").strip()
    assert git(repo, "show", "--name-only", "--format=%s|%an", made).split("\n") == [
        "ct200: svc first snapshot|A User", "", *sorted(FILES), "",
    ]  # fmt: skip
    assert git(repo, "status", "--porcelain") == ""
    assert {path: (repo / path).read_text() for path in FILES} == FILES
    assert stored(repo, FILES) == FILES
    git(repo, "fsck", "--strict")


def test_nothing_changed_is_no_commit(repo: Path) -> None:
    first = commit(repo, FILES, "m")
    assert commit(repo, FILES, "m") is None
    assert git(repo, "rev-parse", "HEAD").strip() == first


def test_a_file_that_is_gone_is_removed_and_other_services_stay(repo: Path) -> None:
    other = {"snapshots/ct200/other/env": "A=1\n"}
    commit(repo, FILES | other, "m")
    fewer = {f"{TOP}/unit.service": "[Unit]\nA=2\n"}
    commit(repo, fewer, "m")
    assert git(repo, "ls-files", "snapshots").split() == ["snapshots/ct200/other/env", f"{TOP}/unit.service"]
    assert not (repo / TOP / "dropins" / "a.conf").exists()
    assert git(repo, "status", "--porcelain") == ""
    assert stored(repo, fewer) == fewer


def test_what_the_user_has_staged_changed_or_lying_about_stays_exactly(repo: Path) -> None:
    (repo / "staged").write_text("staged new\n")
    (repo / "both").write_text("both staged\n")
    (repo / "new").write_text("new\n")
    (repo / "intended").write_text("later\n")
    git(repo, "add", "staged", "both", "new")
    git(repo, "add", "-N", "intended")
    git(repo, "rm", "-q", "--cached", "deleted")
    (repo / "both").write_text("both edited\n")
    (repo / "edited").write_text("edited new\n")
    (repo / "untracked").write_text("untracked\n")
    before = (
        git(repo, "status", "--porcelain=v2"),
        git(repo, "ls-files", "-s"),
        git(repo, "diff"),
        git(repo, "diff", "--cached"),
    )
    made = commit(repo, FILES, "m")
    assert made is not None
    assert git(repo, "show", "--name-only", "--format=", made).split() == sorted(FILES)
    after = [
        git(repo, "status", "--porcelain=v2"),
        git(repo, "ls-files", "-s"),
        git(repo, "diff"),
        git(repo, "diff", "--cached"),
    ]
    after[1] = "".join(line for line in after[1].splitlines(True) if "snapshots/" not in line)
    assert tuple(after) == before


def test_what_the_user_staged_or_edited_in_the_snapshot_itself_stays(repo: Path) -> None:
    commit(repo, FILES, "m")
    unit, args, dropin = (repo / TOP / name for name in ("unit.service", "server-args.json", "dropins/a.conf"))
    unit.write_text("staged by hand\n")
    git(repo, "add", str(unit))
    unit.write_text("edited after that\n")
    args.write_text("edited by hand\n")
    new = {path: f"new {path}\n" for path in FILES}
    made = commit(repo, new, "m")
    assert made is not None
    assert {path: git(repo, "show", f"{made}:{path}") for path in FILES} == new
    assert git(repo, "show", f":{TOP}/unit.service") == "staged by hand\n"
    assert unit.read_text() == "edited after that\n"
    assert args.read_text() == "edited by hand\n"
    assert dropin.read_text() == new[f"{TOP}/dropins/a.conf"]
    assert git(repo, "status", "--porcelain").splitlines() == [f" M {TOP}/server-args.json", f"MM {TOP}/unit.service"]


def test_a_workspace_below_the_top_and_a_linked_worktree(repo: Path, tmp_path: Path) -> None:
    below = repo / "ops" / "gpu"
    below.mkdir(parents=True)
    commit(below, FILES, "m")
    assert git(repo, "ls-files", "ops").split() == [f"ops/gpu/{path}" for path in sorted(FILES)]
    assert stored(below, FILES) == FILES and git(repo, "status", "--porcelain") == ""
    git(repo, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    assert commit(tmp_path / "side", FILES, "m") == git(repo, "rev-parse", "side").strip()
    assert git(tmp_path / "side", "status", "--porcelain") == "" == git(repo, "status", "--porcelain")


def test_the_first_commit_of_a_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "config", "user.name", "U")
    git(tmp_path, "config", "user.email", "u@example.org")
    (tmp_path / "mine").write_text("x")
    git(tmp_path, "add", "mine")
    assert stored(tmp_path, FILES) == {}
    commit(tmp_path, FILES, "m")
    assert git(tmp_path, "show", "--name-only", "--format=").split() == sorted(FILES)
    assert git(tmp_path, "status", "--porcelain").splitlines()[0] == "A  mine"


def test_ignored_snapshots_and_hooks_do_not_matter(repo: Path) -> None:
    (repo / ".gitignore").write_text("snapshots/\n")
    for name in ("pre-commit", "commit-msg", "post-commit", "reference-transaction", "post-index-change"):
        hook = repo / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {repo}/ran-{name}\nexit 1\n")
        hook.chmod(0o755)
    assert commit(repo, FILES, "m")
    assert not list(repo.glob("ran-*"))


def test_a_foreign_git_environment_is_not_followed(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a run from a git hook, whose environment names another repository and index."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    made = commit(repo, FILES, "m")
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_INDEX_FILE")
    assert git(repo, "rev-parse", "HEAD").strip() == made


def unchanged(where: Path) -> tuple[str, str, str]:
    return (
        git(where, "rev-parse", "HEAD"),
        git(where, "ls-files", "-s"),
        git(where, "status", "--porcelain", "--ignored"),
    )


def refused(where: Path, said: str) -> Failed:
    with pytest.raises(Failed, match=said) as caught:
        commit(where, FILES, "m")
    return caught.value


def test_no_repository(tmp_path: Path) -> None:
    assert "init" in refused(tmp_path, "not in a git repository").hint
    with pytest.raises(Failed, match="not in a git repository"):
        stored(tmp_path, FILES)
    assert list(tmp_path.iterdir()) == []


def test_no_identity(repo: Path) -> None:
    git(repo, "config", "--unset", "user.email")
    before = unchanged(repo)
    assert "user.email" in refused(repo, "does not know who commits").hint
    assert unchanged(repo) == before


def conflict(repo: Path) -> None:
    git(repo, "switch", "-qc", "side")
    (repo / "kept").write_text("side\n")
    git(repo, "commit", "-qam", "side")
    git(repo, "switch", "-q", "main")
    (repo / "kept").write_text("main\n")
    git(repo, "commit", "-qam", "main")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["rebase", "side"], "a rebase"),
        (["merge", "side"], "a merge"),
        (["cherry-pick", "side"], "a cherry-pick"),
        (["bisect", "start"], "a bisect"),
    ],
)
def test_something_under_way(repo: Path, command: list[str], said: str) -> None:
    conflict(repo)
    subprocess.run(["git", *command], cwd=repo, capture_output=True)
    before = unchanged(repo)
    refused(repo, f"{said}.* in progress")
    assert unchanged(repo) == before


def test_a_detached_head(repo: Path) -> None:
    git(repo, "checkout", "-q", "--detach")
    assert "git switch" in refused(repo, "detached").hint


def test_another_git_at_work(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_ops.snapshot.record.LOCK_PATIENCE_S", 0.2)
    lock = repo / ".git" / "index.lock"
    lock.write_text("theirs")
    before = unchanged(repo)
    assert str(lock) in refused(repo, "another git").hint
    assert lock.read_text() == "theirs" and unchanged(repo) == before


def test_a_lock_that_goes_away_in_time(repo: Path) -> None:
    lock = repo / ".git" / "index.lock"
    lock.write_text("theirs")
    threading.Timer(0.3, lock.unlink).start()
    assert commit(repo, FILES, "m")


@pytest.mark.parametrize("link", ["snapshots", "snapshots/ct200", "snapshots/ct200/svc/unit.service"])
@pytest.mark.parametrize("tracked", [True, False])
def test_a_symlink_on_the_way(repo: Path, tmp_path: Path, link: str, tracked: bool) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (repo / link).parent.mkdir(parents=True, exist_ok=True)
    (repo / link).symlink_to(outside)
    if tracked:
        git(repo, "add", ".")
        git(repo, "commit", "-qm", "link")
        (repo / link).unlink()
    before = unchanged(repo)
    refused(repo, "symlink|something else")
    assert list(outside.iterdir()) == [] and unchanged(repo) == before


def test_a_file_where_a_directory_should_be(repo: Path) -> None:
    (repo / "snapshots").write_text("mine\n")
    refused(repo, "not a directory")
    assert (repo / "snapshots").read_text() == "mine\n"


def test_a_work_tree_that_cannot_be_written(repo: Path) -> None:
    """Given a path too long for the file system: as for a read-only one, nothing is committed and nothing is left."""
    before = unchanged(repo)
    long = {f"{TOP}/dropins/{'z' * 300}.conf": "x\n", **FILES}
    with pytest.raises(Failed, match="nothing was committed"):
        commit(repo, long, "m")
    assert unchanged(repo) == before
    assert not (repo / "snapshots").exists()
    assert not [p for p in (repo / ".git").iterdir() if "ddtree" in p.name or p.name.endswith(".lock")]


@pytest.mark.parametrize(
    "path",
    [
        "unit",
        "../x/y/z",
        "snapshots/ct200/unit",
        "snapshots/ct200/svc/../../a",
        "snapshots/ct200/svc/.git",
        "/snapshots/a/b/c",
        "snapshots/ct200/svc/a\nb",
        "snapshots/CT/svc/a",
        "snapshots/ct200/svc/a/b/c",
    ],
)
def test_other_paths_are_refused(repo: Path, path: str) -> None:
    with pytest.raises(UsageError):
        commit(repo, {path: "x"}, "m")


def test_two_snapshots_at_once_are_both_kept(repo: Path) -> None:
    problems: list[BaseException] = []

    def one(host: str) -> None:
        try:
            for n in range(4):
                assert commit(repo, {f"snapshots/{host}/svc/env": f"N={n}\n"}, f"{host} {n}")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=one, args=(host,)) for host in ("ct200", "b300", "local")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert git(repo, "rev-list", "--count", "HEAD").strip() == "13"
    for host in ("ct200", "b300", "local"):
        assert git(repo, "show", f"HEAD:snapshots/{host}/svc/env") == "N=3\n"
    assert git(repo, "status", "--porcelain") == ""
    git(repo, "fsck", "--strict")
