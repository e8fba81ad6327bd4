"""Diffs, against GNU diff and git as the judges of what a diff means."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.errors import Failed
from ddtree_ops.release.udiff import apply_diff, parse_diff, plain_path, split_patch

OLD = b"".join(b"line %d\n" % n for n in range(1, 31))
NEW = OLD.replace(b"line 3\n", b"line three\n").replace(b"line 20\n", b"").replace(b"line 29\n", b"line 29\nmore\n")


def diff(tmp_path: Path, old: bytes, new: bytes, *options: str) -> bytes:
    """What ``diff -u`` says, with our prefixes."""
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    labels = ("--label", "a/pkg/f.py", "--label", "b/pkg/f.py")
    done = subprocess.run(
        ["diff", "-u", "-a", *labels, *options, str(tmp_path / "old"), str(tmp_path / "new")], capture_output=True
    )
    assert done.returncode < 2, done.stderr
    return done.stdout


def applied(text: bytes, old: bytes) -> bytes:
    (one,) = parse_diff(text, "0001-x.patch")
    return apply_diff(one, old, "0001-x.patch")


def test_a_diff_does_what_it_says(tmp_path: Path) -> None:
    text = diff(tmp_path, OLD, NEW)
    (one,) = parse_diff(text, "x")
    assert one.path == "pkg/f.py"
    assert [hunk.number for hunk in one.hunks] == [1, 2, 3]
    assert apply_diff(one, OLD, "x") == NEW


LINES = st.lists(st.sampled_from([b"a", b"b", b"c", b"", b"-- x", b"@@", b"\r", b"\x0c", b"\xff", b"+"]), max_size=14)


@settings(max_examples=150, deadline=None)
@given(LINES, LINES, st.booleans(), st.booleans(), st.integers(0, 3))
def test_any_pair_of_texts_comes_out_as_gnu_diff_meant_it(
    tmp_path_factory: pytest.TempPathFactory, old: list[bytes], new: list[bytes], end1: bool, end2: bool, context: int
) -> None:
    one, two = b"\n".join(old) + b"\n" * end1, b"\n".join(new) + b"\n" * end2
    if one != two and one and two:
        assert applied(diff(tmp_path_factory.mktemp("d"), one, two, f"-U{context}"), one) == two


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda old: b"new first line\n" + old, r"hunk 1: would apply with an offset of \+1 lines"),
        (lambda old: old.replace(b"line 1\n", b""), "hunk 1: rejected: line 1 should be b'line 1"),
        (lambda old: old.replace(b"line 9\n", b""), "hunk 2: would apply with an offset of -1 lines"),
        (lambda old: old.replace(b"line 18\n", b"line  18\n"), r"hunk 2: rejected: line 18 .*has b'line  18"),
        (lambda old: old.replace(b"line 30\n", b"line 30"), "hunk 3: rejected: line 30"),
        (lambda old: old[:60], "hunk 2: rejected: line 17"),
        (lambda old: b"", "hunk 1: rejected: line 1 should be .*the file ends before it"),
    ],
)
def test_offset_fuzz_and_reject_name_patch_file_and_hunk(
    tmp_path: Path, change: Callable[[bytes], bytes], complaint: str
) -> None:
    text = diff(tmp_path, OLD, NEW)
    with pytest.raises(Failed, match=rf"^0001-x\.patch: pkg/f\.py: {complaint}"):
        applied(text, change(OLD))


def test_what_git_and_patch_would_let_pass_is_refused(tmp_path: Path) -> None:
    """The point of an applier of our own: both exit 0 here."""
    text = diff(tmp_path, OLD, OLD.replace(b"line 20\n", b"line twenty\n"))
    moved = b"inserted\n" + OLD
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/f.py").write_bytes(moved)
    (tmp_path / "x.patch").write_bytes(text)
    subprocess.run(["git", "apply", "--check", "x.patch"], cwd=tmp_path, check=True)
    subprocess.run(["patch", "-p1", "--dry-run", "-i", "x.patch"], cwd=tmp_path, check=True, capture_output=True)
    with pytest.raises(Failed, match="offset"):
        applied(text, moved)


HEAD = b"--- a/f\n+++ b/f\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "new files belong into overlay"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "it deletes a file"),
        (b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-x\n+y\n", "it renames f to g"),
        (b"--- a//etc/passwd\n+++ b//etc/passwd\n@@ -1 +1 @@\n-x\n+y\n", "a path below site-packages"),
        (b"--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-x\n+y\n", "a path below site-packages"),
        (b"--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-x\n+y\n", "a path below site-packages"),
        (b"--- a/x/../../x\n+++ b/x/../../x\n@@ -1 +1 @@\n-x\n+y\n", "a path below site-packages"),
        (b"--- a/f\t2020-01-01\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n", "a path below site-packages"),
        (b"--- f\n+++ f\n@@ -1 +1 @@\n-x\n+y\n", "expected '--- a/'"),
        (b"diff --git a/f b/f\nold mode 100644\nnew mode 100755\n", "a file's mode"),
        (b"diff --git a/f b/f\nnew file mode 120000\nindex 000..1\n", "makes a file"),
        (b"diff --git a/f b/f\ndeleted file mode 100644\n", "deletes a file"),
        (b"diff --git a/f b/g\nsimilarity index 90%\nrename from f\n", "renames or copies"),
        (b"diff --git a/f b/f\nindex 1111..2222 120000\n" + HEAD + b"@@ -1 +1 @@\n-x\n+y\n", "a link"),
        (b"diff --git a/f b/f\nindex 1111..2222 100644\nGIT binary patch\n", "binary"),
        (b"diff --git a/f b/f\nindex 1111..2222 100644\nBinary files a/f and b/f differ\n", "binary"),
        (b"diff --git a/g b/g\n" + HEAD + b"@@ -1 +1 @@\n-x\n+y\n", "names other files"),
        (HEAD, "f: no hunks"),
        (HEAD + b"@@ -1 +1 @@\n x\n", "hunk 1: it changes nothing"),
        (HEAD + b"@@ -1,2 +1 @@\n-x\n+y\n", "hunk 1: expected a line that starts"),
        (HEAD + b"@@ -1 +1 @@\n-x\n+y\n+z\n", "line 6 of the diff: expected '--- a/'"),
        (HEAD + b"@@ -1 +1 @@\n-x\n+y\n-- \n2.39.5\n", "expected '--- a/'"),
        (HEAD + b"@@ -1 +2 @@\n-x\n+y\n", "line numbers do not fit"),
        (HEAD + b"@@ -1,2 +1,2 @@\n-x\n+y\n\n", "hunk 1: expected a line that starts"),
        (HEAD + b"@@ -4 +4 @@\n-x\n+y\n@@ -2 +2 @@\n-x\n+y\n", "hunk 2: it overlaps"),
        (HEAD + b"@@ -1 +1 @@\n-x\n+y\n" + HEAD + b"@@ -1 +1 @@\n-y\n+z\n", "f is changed twice"),
        (HEAD + b"@@ -1 @@\n-x\n", "hunk 1: not a hunk's first line"),
        (HEAD + b"@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+y", "hunk 1"),
    ],
)
def test_what_a_series_does_not_do_is_refused(text: bytes, complaint: str) -> None:
    with pytest.raises(Failed, match=r"^p: "):
        applied_to_nothing(text)
    with pytest.raises(Failed, match=complaint):
        applied_to_nothing(text)


def applied_to_nothing(text: bytes) -> None:
    for one in parse_diff(text, "p"):
        apply_diff(one, b"x\n", "p")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/x", "a//b", "./a", "a/..", "a/./b", "a\\b", "C:x", "a\nb", "a/", 'a"']
)
def test_names_that_lead_elsewhere_are_not_plain(name: str) -> None:
    assert not plain_path(name)
    assert plain_path("sglang/srt/a-b_c+1.py")


def test_the_header_is_what_stands_before_the_diff() -> None:
    assert split_patch(b"Why: x\n---\nWhat: y\n\n--- a/f\n+++ b/f\n") == (
        b"Why: x\n---\nWhat: y\n\n",
        b"--- a/f\n+++ b/f\n",
    )
    assert split_patch(b"no diff") == (b"no diff", b"")
