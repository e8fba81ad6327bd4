"""Shared by all tests: what a run leaves out is said at its end, with the reason and the way to run it.

That holds for a run in one process and for one spread over workers (``-n``), where only the workers collect.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parent.parent
# caches of builds stay inside the checkout, whoever runs the tests
os.environ["XDG_CACHE_HOME"] = str(CHECKOUT / ".local" / "cache")
# torch here and in all that is started from here: several workers with a thread for every core each slow each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

LEFT_OUT = {
    "hosts": ("HOSTS", "they make real hosts with systemd and sshd and want root: HOSTS=1 make test"),
    "browser": ("BROWSER", "they want Debian's chromium: HOSTS=1 make test installs and runs it, BROWSER=1 runs it"),
    "gpu": ("GPU", "they want an NVIDIA GPU and a release of the patched SGLang: see tests/gpu/"),
}
# What takes long, longest first: workers take file after file, and the last one taken should be a short one.
LONG = (
    "tests/hosts/",
    "tests/unit/exactness/",
    "tests/unit/sweep/",
    "tests/unit/engine/",
    "tests/unit/patches/",
    "tests/unit/doctor/",
    "tests/unit/host/",
)
_counts: Counter[str] = Counter()


def switched_too(mark: str) -> bool:
    """The browser comes with what the test hosts need."""
    return mark == "browser" and bool(os.environ.get("HOSTS"))


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
    """The place of the item's file among those that workers take."""
    return next((place for place, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG))


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
