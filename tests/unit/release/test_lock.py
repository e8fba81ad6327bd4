"""Lock files."""

from __future__ import annotations

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.model.routers import RELEASE_BASE
from ddtree_ops.release import Target, release_id
from ddtree_ops.release.lock import LOCKS, load_lock, locked_pythons, parse_lock

A, B = "a" * 64, "b" * 64
HEAD = "# python: 3.11\n# machine: x86_64\n# glibc: 2.28\n"


def test_a_lock_is_read_whole() -> None:
    remarks = "# extra-index: https://example.org/w\n# a remark\n\n"
    text = f"{HEAD}{remarks}Torch_X==2.1+cpu \\\n    --hash=sha256:{A}\nb==1 --hash=sha256:{B}\n"
    lock = parse_lock(text, "x")
    assert [(pin.name, pin.version, pin.sha256) for pin in lock.pins] == [("torch-x", "2.1+cpu", A), ("b", "1", B)]
    assert lock.requires == {"python": "3.11", "machine": "x86_64", "glibc": "2.28", "driver": None}
    assert lock.extra_index == "https://example.org/w"


def test_a_lock_says_who_needs_what() -> None:
    text = f"{HEAD}# driver: 580\n# resolve: a==1\na==1 --hash=sha256:{A}\nb==1 --hash=sha256:{B}  # via a, b\n"
    lock = parse_lock(text, "x")
    assert (lock.driver, lock.resolve) == ("580", "a==1")
    assert [pin.via for pin in lock.pins] == [(), ("a", "b")]
    with pytest.raises(UsageError, match="names what is not pinned: c"):
        parse_lock(f"{HEAD}b==1 --hash=sha256:{B}  # via c", "x")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEAD + f"a>=1 --hash=sha256:{A}", "line 4: expected name==version"),
        (HEAD + "a==1", "line 4"),
        (HEAD + f"a==1 --hash=sha256:{A} --hash=sha256:{B}", "line 4"),
        (HEAD + f"a==1 --hash=md5:{A}", "line 4"),
        (HEAD + "-r other.txt", "line 4"),
        (HEAD + f"a==1 --hash=sha256:{A}\nA==1 --hash=sha256:{A}", "a is pinned twice"),
        (HEAD, "lacks pins"),
        (f"a==1 --hash=sha256:{A}", "lacks glibc, machine, python"),
    ],
)
def test_nothing_is_skipped(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_lock(text, "x")


def test_an_absent_lock_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"no lock file reference-cp399\.txt; there are: .*reference-cp311"):
        load_lock("reference", "3.99")
    with pytest.raises(UsageError, match=r"no lock file for 'refer'; there are: .*reference-cp311"):
        locked_pythons("refer")


def test_the_pythons_of_a_base_are_its_own() -> None:
    assert locked_pythons("reference") == ["3.11"]
    assert locked_pythons("sglang-0.5.17") == ["3.11", "3.12"]


def test_every_lock_that_ships_is_sound_and_named_after_its_python() -> None:
    names = sorted(path.stem for path in LOCKS.glob("*.txt"))
    assert names
    for name in names:
        engine, _, tag = name.rpartition("-cp")
        assert load_lock(engine, f"{tag[0]}.{tag[1:]}").pins


def test_the_router_is_locked_in_one_version() -> None:
    found = {python: load_lock(RELEASE_BASE, python) for python in locked_pythons(RELEASE_BASE)}
    assert list(found) == ["3.11", "3.12"]
    versions = {python: {pin.name: pin.version for pin in lock.pins} for python, lock in found.items()}
    assert versions["3.11"] == versions["3.12"] and versions["3.11"]["sglang-router"] == "0.3.2"
    ids = {release_id(Target(RELEASE_BASE, python)) for python in found}
    assert len(ids) == 2  # each with wheels of its own, and none with a patch
