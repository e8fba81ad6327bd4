"""Into a git tree and back, by the commands that a person would use in between."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release.git import Git
from ddtree_ops.release.patchset import Patch, load_patchset
from ddtree_ops.release.refresh import Refreshed, refresh
from ddtree_ops.release.workflow import Stock, applied, edit, read_stock

from .patchwright import F2, HEADER, PATCHES, STOCK, make_patch, write_series
from .wheelwright import PROGRAM, make_wheel

NOTHING = Refreshed((), ())


@pytest.fixture
def wheel(tmp_path: Path) -> Stock:
    files = {
        **STOCK,
        "pkg/tool": b"#!/bin/sh\r\n",
        "pkg/.gitattributes": b"* text=auto eol=crlf\n",
        "pkg/x.so": b"\0\1",
    }
    return read_stock(make_wheel(tmp_path, "pkg", files, modes={"pkg/tool": PROGRAM}))


def everything(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def git(tree: Path, *words: str) -> str:
    """As a person runs it, with an identity and a habit of their own."""
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org", "-c", "core.autocrlf=true")
    done = subprocess.run(["git", "-C", str(tree), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout


def commit(tree: Path, path: str, content: bytes, message: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_bytes(content)
    git(tree, "add", "--all")
    git(tree, "commit", "-q", "-m", message)


def test_a_tree_has_a_commit_a_patch_and_refresh_right_after_changes_no_byte(tmp_path: Path, wheel: Stock) -> None:
    patches, tree = write_series(tmp_path / "patches"), tmp_path / "tree"
    before = everything(patches)
    subjects = edit(wheel, load_patchset(patches), tree)
    assert subjects == [
        "stock: pkg-1.0-py3-none-any.whl",
        *["Why: the stock engine does not"] * 2,
        "overlay: new files",
    ]
    assert git(tree, "rev-list", "--count", "HEAD") == "4\n"
    assert git(tree, "show", "-s", "--format=%B", "HEAD~1").startswith(HEADER + "Patch-File: 0002-second.patch\n")
    assert (tree / "pkg/f.py").read_bytes() == F2
    assert (tree / "pkg/tool").read_bytes() == b"#!/bin/sh\r\n"
    assert os.access(tree / "pkg/tool", os.X_OK)
    assert refresh(wheel, patches, tree) == NOTHING
    assert everything(patches) == before


def test_hand_written_patches_stay_as_they_were_written(tmp_path: Path, wheel: Stock) -> None:
    """Another number of context lines, git's own lines, a header with blank lines and a comment sign."""
    text = "\n# not a comment\n\n" + HEADER + "\n\n"
    diff = "diff --git a/pkg/g.py b/pkg/g.py\nindex 1234..5678 100644\n--- a/pkg/g.py\n+++ b/pkg/g.py\n@@ -2 +2 @@ g\n"
    content = (text + diff + "-h = 2\n+h = 7\n").encode()
    patches = write_series(tmp_path / "patches", {"x.patch": content})
    before = everything(patches)
    edit(wheel, load_patchset(patches), tmp_path / "tree")
    assert refresh(wheel, patches, tmp_path / "tree") == NOTHING
    assert everything(patches) == before


def test_two_trees_of_one_series_are_the_same_to_git(tmp_path: Path, wheel: Stock) -> None:
    patchset = load_patchset(write_series(tmp_path / "patches"))
    heads = set()
    for name in ("one", "two"):
        edit(wheel, patchset, tmp_path / name)
        heads.add(git(tmp_path / name, "rev-parse", "HEAD"))
    assert len(heads) == 1


def test_what_is_changed_in_the_tree_comes_back(tmp_path: Path, wheel: Stock) -> None:
    patches, tree = write_series(tmp_path / "patches"), tmp_path / "tree"
    edit(wheel, load_patchset(patches), tree)
    more = F2.replace(b"f18 = 18\n", b"f18 = 118\n")
    commit(tree, "pkg/f.py", more, HEADER.replace("the stock engine does not", "The 18th is *wrong*"))
    commit(tree, "pkg/deep/er/two.py", b"two = 2\n", "another new file")
    done = refresh(wheel, patches, tree)
    assert done == Refreshed(("0004-the-18th-is-wrong.patch", "overlay/pkg/deep/er/two.py", "series"), ())
    made = load_patchset(patches)
    assert made.apply(wheel.files.get)["pkg/f.py"] == more
    assert (patches / "series").read_text().splitlines()[0] == "# the order matters"
    assert not [fault for patch in made.patches for fault in patch.faults]
    assert (patches / "0001-first.patch").read_bytes() == PATCHES["0001-first.patch"]
    again = tmp_path / "again"
    edit(wheel, made, again)
    assert refresh(wheel, patches, again) == NOTHING


def test_a_patch_that_is_amended_rewrites_what_stands_on_it(tmp_path: Path, wheel: Stock) -> None:
    patches, tree = write_series(tmp_path / "patches"), tmp_path / "tree"
    edit(wheel, load_patchset(patches), tree)
    head = git(tree, "rev-parse", "HEAD").strip()
    git(tree, "checkout", "-q", "HEAD~2")
    (tree / "pkg/f.py").write_bytes(b"early = 0\n" + (tree / "pkg/f.py").read_bytes())
    git(tree, "commit", "-q", "-a", "--amend", "--no-edit")
    git(tree, "cherry-pick", f"{head}~1", head)
    assert refresh(wheel, patches, tree) == Refreshed(("0001-first.patch", "0002-second.patch"), ())
    assert load_patchset(patches).apply(wheel.files.get)["pkg/f.py"] == b"early = 0\n" + F2


def test_what_is_dropped_in_the_tree_goes(tmp_path: Path, wheel: Stock) -> None:
    patches, tree = write_series(tmp_path / "patches"), tmp_path / "tree"
    edit(wheel, load_patchset(patches), tree)
    git(tree, "reset", "-q", "--hard", "HEAD~2")
    assert refresh(wheel, patches, tree) == Refreshed(("series",), ("0002-second.patch", "overlay/pkg/sub/new.py"))
    assert {path.name for path in patches.iterdir()} == {"series", "0001-first.patch"}


def _merge(tree: Path) -> None:
    git(tree, "checkout", "-q", "-b", "other", "HEAD~1")
    commit(tree, "pkg/other.py", b"x\n", "other")
    git(tree, "checkout", "-q", "patches")
    git(tree, "merge", "-q", "other", "-m", "merge")


def _amend_stock(tree: Path) -> None:
    git(tree, "checkout", "-q", "--orphan", "new")
    git(tree, "commit", "-q", "-m", "all in one")


def _delete(tree: Path) -> None:
    git(tree, "rm", "-q", "pkg/g.py")
    git(tree, "commit", "-q", "-m", "gone")


def _mode(tree: Path) -> None:
    (tree / "pkg/g.py").chmod(0o755)
    git(tree, "commit", "-q", "-a", "-m", "mode")


def _link(tree: Path) -> None:
    (tree / "pkg/l.py").symlink_to("/etc/passwd")
    git(tree, "add", "--all")
    git(tree, "commit", "-q", "-m", "link")


@pytest.mark.parametrize(
    ("do", "complaint"),
    [
        (lambda tree: (tree / "pkg/g.py").write_bytes(b"g = 9\n"), "not committed: pkg/g.py"),
        (lambda tree: (tree / "pkg/n.py").write_bytes(b"n\n"), "not committed: pkg/n.py"),
        (_merge, "merges"),
        (_amend_stock, "its first commit is not pkg-1.0"),
        (_delete, "pkg/g.py: a patch changes the text of a stock file and nothing else"),
        (_mode, "pkg/g.py: a patch changes the text"),
        (_link, "has mode 120000"),
        (lambda tree: commit(tree, "pkg/x.so", b"\0\2", "so"), "is a binary file"),
        (lambda tree: commit(tree, "pkg/.h/x.py", b"1\n", "hidden"), "refused the name"),
        (
            lambda tree: commit(tree, "pkg/g.py", b"g = 9\n", "x\n\nPatch-File: ../x.patch"),
            "names the patch '../x.patch'",
        ),
        (lambda tree: commit(tree, "pkg/g.py", b"g = 9\n", "x\n\nPatch-File: 0001-first.patch"), "or another's"),
        (lambda tree: commit(tree, "pkg/g.py", b"g = 9\n", "x\n\n--- a/x\n+++ b/x"), "reads as a diff's first"),
    ],
)
def test_what_a_series_cannot_say_is_refused_and_nothing_written(
    tmp_path: Path, wheel: Stock, do, complaint: str
) -> None:
    patches, tree = write_series(tmp_path / "patches"), tmp_path / "tree"
    edit(wheel, load_patchset(patches), tree)
    before = everything(patches)
    do(tree)
    with pytest.raises(Failed, match=complaint):
        refresh(wheel, patches, tree)
    assert everything(patches) == before


def test_caches_of_python_in_the_tree_do_not_matter(tmp_path: Path, wheel: Stock) -> None:
    patches, tree = write_series(tmp_path / "patches"), tmp_path / "tree"
    edit(wheel, load_patchset(patches), tree)
    (tree / "pkg/__pycache__").mkdir()
    (tree / "pkg/__pycache__/f.cpython-312.pyc").write_bytes(b"x")
    assert refresh(wheel, patches, tree) == NOTHING


def test_a_tree_is_never_made_over_something_and_never_half(tmp_path: Path, wheel: Stock) -> None:
    patchset = load_patchset(write_series(tmp_path / "patches"))
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/x").write_bytes(b"mine")
    with pytest.raises(Failed, match="is there already"):
        edit(wheel, patchset, tmp_path / "tree")
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(Failed, match="is there already"):
        edit(wheel, patchset, tmp_path / "file")
    wrong = Stock(wheel.name, {**wheel.files, "pkg/g.py": b"other\n"}, wheel.programs)
    with pytest.raises(Failed, match=r"0002-second\.patch: pkg/g\.py: hunk 1"):
        edit(wrong, patchset, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_git_directory_in_a_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="refused the name"):
        read_stock(make_wheel(tmp_path, "evil", {"pkg/.git/hooks/post-commit": b"#!/bin/sh\n"}))


def test_faults_of_the_result_are_told(tmp_path: Path, wheel: Stock) -> None:
    bad = Patch("x.patch", make_patch({"pkg/g.py": (STOCK["pkg/g.py"], b"g = \nh = 2\n")}))
    overlay = {"pkg/n.py": b"def f(:\n", "pkg/data.json": b"{"}
    patchset = load_patchset(write_series(tmp_path / "p", {"x.patch": bad.data}, overlay))
    found = applied(patchset, wheel)
    assert [fault.partition(" does not compile")[0] for fault in found] == ["pkg/n.py", "pkg/g.py"]
    moved = Stock(wheel.name, {**wheel.files, "pkg/g.py": b"x\n" + STOCK["pkg/g.py"]}, frozenset())
    (fault,) = applied(patchset, moved)
    assert fault.startswith("x.patch: pkg/g.py: hunk 1: would apply with an offset of +1 lines")
    assert fault.endswith("(pkg-1.0-py3-none-any.whl)")


def test_git_says_what_went_wrong(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"git status: .*not a git repository"):
        Git(tmp_path).dirt()
