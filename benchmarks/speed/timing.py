"""Timing whole processes against each other: in turns, in one run, on one machine. Only ratios are worth keeping."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Nothing of the one who runs this may slow a contestant down or speed it up.
LEFT_OUT = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Case:
    """One contestant. ``argvs``: its processes, all started at once, timed until the last has ended.

    ``check``: raises for an output that does not show the work as done; ``before`` and ``after`` are not timed.
    """

    name: str
    argvs: Sequence[Sequence[str]]
    cwd: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    check: Callable[[str], None] = lambda said: None
    before: Callable[[], None] = lambda: None


@dataclass
class Measured:
    """``seconds`` of each round; ``peak_mb``: the largest resident set of one of its processes."""

    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    def as_json(self) -> dict[str, float | list[float]]:
        low, middle, high = spread(self.seconds)
        return {"median_s": middle, "least_s": low, "most_s": high, "peak_mb": round(self.peak_mb, 1)}


def race(cases: Sequence[Case], rounds: int) -> dict[str, Measured]:
    """Every case once a round, in an order that turns; one round before is not counted (caches, byte code)."""
    found = {case.name: Measured() for case in cases}
    for number in range(rounds + 1):
        turn = number % len(cases)
        for case in (*cases[turn:], *cases[:turn]):
            seconds, peak = once(case)
            if number:
                found[case.name].seconds.append(seconds)
                found[case.name].peak_mb = max(found[case.name].peak_mb, peak)
    return found


def once(case: Case) -> tuple[float, float]:
    """Seconds, and the largest peak memory in MB. Raises SystemExit for a contestant that failed at its work."""
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT} | case.environment
    case.before()
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        running = [
            subprocess.Popen(
                argv, cwd=case.cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
            for argv in case.argvs
        ]
        ended = [os.wait4(process.pid, 0) for process in running]
        took = time.perf_counter() - began
        for process, (_, status, _) in zip(running, ended, strict=True):
            process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().decode(errors="replace")
    if any(process.returncode for process in running):
        raise SystemExit(f"{case.name}: exit {[process.returncode for process in running]}\n{said[-3000:]}")
    case.check(said)
    return took, max(usage.ru_maxrss for _, _, usage in ended) / 1024


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, median, most."""
    return min(values), statistics.median(values), max(values)


def ratio(ours: Measured, theirs: Measured) -> tuple[float, float, float]:
    """Least, median and most of the rounds' ratios: what disturbs a round disturbs both who run in it."""
    return spread([a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)])


def says(text: str) -> Callable[[str], None]:
    """A check that the output holds the text."""

    def check(said: str) -> None:
        if text not in said:
            raise SystemExit(f"expected {text!r} in:\n{said[-3000:]}")

    return check
