"""Locks written anew, by the real pip over a small index."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.release.cache import file_sha256
from ddtree_ops.release.lock import LOCKS, parse_lock
from ddtree_ops.release.relock import relock

from .index import Index
from .wheelwright import make_wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HEAD = f"# a remark\n# python: {PYTHON}\n# machine: x86_64\n# glibc: 2.34\n"
ZERO = "0" * 64


@pytest.fixture
def wheels(index: Index) -> dict[str, Path]:
    """root needs torch and extra[fast]; fast is what the extra needs; spare what nobody asks for."""
    needs: dict[str, tuple[str, ...]] = {
        "root": ("torch", "Extra[fast] >=1", "spare; extra == 'all'", "never; python_version < '3'"),
        "torch": ("cuda",),
        "cuda": (),
        "extra": ("fast; extra == 'fast'", "torch; extra == 'gpu'", "spare; extra == 'gpu'"),
        "fast": ("root",),
        "spare": (),
    }
    return {name: make_wheel(index.directory, name, {f"{name}.py": b""}, requires=need) for name, need in needs.items()}


def test_a_resolution_says_hashes_and_who_needs_what(wheels: dict[str, Path]) -> None:
    lock = parse_lock(f"{HEAD}# resolve: root==1.0\nroot==1.0 --hash=sha256:{ZERO}\n", "x")
    text = relock(lock, [])
    hashes = {name: file_sha256(path) for name, path in wheels.items()}
    assert text.splitlines() == [
        *f"{HEAD}# resolve: root==1.0".splitlines(),
        f"cuda==1.0 --hash=sha256:{hashes['cuda']}  # via torch",
        f"extra==1.0 --hash=sha256:{hashes['extra']}  # via root",
        f"fast==1.0 --hash=sha256:{hashes['fast']}  # via extra",
        f"root==1.0 --hash=sha256:{hashes['root']}",
        f"torch==1.0 --hash=sha256:{hashes['torch']}  # via root",
    ]
    assert relock(parse_lock(text, "x"), []) == text


def test_a_list_of_pins_is_what_it_says_and_nothing_more(wheels: dict[str, Path]) -> None:
    lock = parse_lock(f"{HEAD}torch==1.0 --hash=sha256:{ZERO}\n", "x")
    assert [pin.requirement for pin in parse_lock(relock(lock, ["spare==1.0"]), "x").pins] == [
        "spare==1.0",
        "torch==1.0",
    ]


def test_what_cannot_be_resolved_is_refused(wheels: dict[str, Path]) -> None:
    lock = parse_lock(f"{HEAD}# resolve: root==1.0\nroot==1.0 --hash=sha256:{ZERO}\n", "x")
    with pytest.raises(Failed, match="pip cannot resolve it"):
        relock(lock, ["torch==2.0"])
    with pytest.raises(UsageError, match=r"python3\.1, which is not in PATH"):
        relock(parse_lock(lock.text.replace(f"python: {PYTHON}", "python: 3.1"), "x"), [])


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_the_locks_that_ship_are_in_the_form_that_is_written(path: Path) -> None:
    lines = path.read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins == sorted(pins, key=lambda line: line.partition("==")[0])
    assert lines[: len(lines) - len(pins)] == [line for line in lines if line.startswith("#")]
    lock = parse_lock(path.read_text(), path.name)
    assert [pin.requirement for pin in lock.pins if not pin.via] == [lock.resolve] or lock.resolve is None
