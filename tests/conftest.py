"""Shared by all tests: what a run leaves out is said at its end, with the reason and the way to run it.

That holds for a run in one process and for one spread over workers (``-n``), where only the workers collect. A worker
takes file after file; tests marked ``alone`` come last, and while one runs no other worker runs anything.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parent.parent
# caches of builds stay inside the checkout, whoever runs the tests
os.environ["XDG_CACHE_HOME"] = str(CHECKOUT / ".local" / "cache")
# what nobody expected shows where it came up
os.environ.setdefault("DDTREE_DEBUG", "1")
# torch here and in all that is started from here: several workers with a thread for every core each slow each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

LEFT_OUT = {
    "hosts": ("HOSTS", "they make real hosts with systemd and sshd and want root: HOSTS=1 make test"),
    "browser": ("BROWSER", "they want Debian's chromium: HOSTS=1 make test installs and runs it, BROWSER=1 runs it"),
    "slow": ("SLOW", "whole engines, sweeps, steps of the patched SGLang; CI runs them: HOSTS=1 or SLOW=1 make test"),
    "long": ("LONG", "the same at more sizes, for many minutes: LONG=1 make test"),
    "gpu": ("GPU", "they want an NVIDIA GPU and a release of the patched SGLang: see tests/gpu/"),
}
# What takes long, longest first: workers take file after file, and the last one taken should be a short one.
LONG = (
    "tests/hosts/",
    "tests/unit/router/",
    "tests/unit/exactness/",
    "tests/unit/sweep/",
    "tests/unit/engine/",
    "tests/unit/patches/",
    "tests/unit/doctor/",
    "tests/unit/host/",
)
DOOR, HALL = CHECKOUT / "pyproject.toml", CHECKOUT / "tests" / "conftest.py"
_counts: Counter[str] = Counter()


def switched_too(mark: str) -> bool:
    """The browser comes with what the test hosts need, and who waits for those waits for what is slow."""
    return mark in ("browser", "slow") and bool(os.environ.get("HOSTS"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the marked tests whose switch is off; count them for the last lines."""
    kept = []
    for item in items:
        off = [
            mark
            for mark, (switch, _) in LEFT_OUT.items()
            if item.get_closest_marker(mark) and not (os.environ.get(switch) or switched_too(mark))
        ]
        if off:
            _counts[off[0]] += 1
        else:
            kept.append(item)
    if len(kept) != len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    if hasattr(config, "workerinput"):
        items.sort(key=rank)


def rank(item: pytest.Item) -> int:
    """The place of the item's file, or of what is alone, among what workers take."""
    if item.get_closest_marker("alone"):
        return len(LONG) + 1
    return next((place for place, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG))


def behind(collection: Sequence[str]) -> set[str]:
    """The tests that stand behind the rest of their file, in the order that ``rank`` made."""
    found, begun, last = set(), set(), ""
    for nodeid in collection:
        file = nodeid.partition("::")[0]
        if file != last and file in begun:
            found.add(nodeid)
        else:
            begun.add(file)
            last = file
    return found


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """To a worker goes a whole file at a time, so that what a file makes once is made once; or all that is alone.

    Not by xdist's own groups: they are lost where pytest keeps a test's name otherwise than xdist thinks (9.2).
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        alone: frozenset[str] = frozenset()

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            self.alone = frozenset(behind(collection))
            super().add_node_collection(node, collection)

        def _split_scope(self, nodeid: str) -> str:
            return "alone" if nodeid in self.alone else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the test's time limit, which is not for waiting
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test of a worker shares the hall with the others' tests, or has it for itself.

    Locks on two files that are here anyway. All go in by the door, so nobody who wants to be alone waits for ever.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with DOOR.open() as door, HALL.open() as hall:
        fcntl.flock(door, how)
        fcntl.flock(hall, how)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(hall, fcntl.LOCK_UN)  # said, not left to the closing: a process that was forked has it open too


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that writes the summary."""
    told: dict[str, dict[str, int]] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["left_out"] = dict(_counts)


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_testnodedown(node: Any) -> None:
    """Each worker collected all tests, so each says the same; one that crashed says nothing."""
    _counts.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - _counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out and why."""
    for mark, count in sorted(_counts.items()):
        terminalreporter.write_line(f"left out: {count} tests marked '{mark}': {LEFT_OUT[mark][1]}", yellow=True)
