"""The quick form of `make gate-report`: a few planted faults and healthy engines through the gate."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ddtree_ops.engine.faults import FAULTS, Fault
from tests.detector.__main__ import full
from tests.detector.cases import FLOAT32_ONLY, HARMLESS
from tests.detector.report import Outcome, closing, render

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_quick_form_catches_its_faults_and_passes_healthy_engines() -> None:
    command = [sys.executable, "-m", "tests.detector", "--quick"]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as detector:
        try:
            said = detector.communicate(timeout=1400)[0]
        finally:  # its own workers, too: they would go on for as long as they need
            with contextlib.suppress(ProcessLookupError):
                os.killpg(detector.pid, signal.SIGKILL)
    assert detector.returncode == 0, said
    assert re.search(r"\ncaught 4 of 4 faults; 0 false alarms in 2 healthy runs; [\d.]+ s a run\n\Z", said)


def row(section: str, kind: str, fault: str = "", **more: object) -> Outcome:
    fields = {
        "shape": "16/4", "dtype": "float32", "batch": 0, "caught_by": [], "codes": [], "epsilon": 1e-6, "gap": None,
        "rate": 0.0, "beyond": 0.0, "seconds": 2.0, "generated": 1, "prefilled": 1,
    }  # fmt: skip
    return msgspec.convert({"section": section, "kind": kind, "fault": fault} | fields | more, type=Outcome)


@pytest.mark.parametrize(
    ("rows", "line", "good"),
    [
        ([row("faults", "FAIL", "stale-kv")], "caught 1 of 1 faults; 0 false alarms in 1 healthy", True),
        ([row("faults", "EXACT", "stale-kv")], "caught 0 of 1 faults; 0 false alarms in 1 healthy", False),
        ([row("faults", "INCONCLUSIVE", "stale-kv")], "caught 0 of 1 faults", False),
        ([row("faults", "FAIL", "stale-kv"), row("elsewhere", "EXACT", "stale-kv")], "caught 0 of 1 faults", False),
        ([row("faults", "FAIL", "stale-kv"), row("bfloat16", "NEAR-TIE", "stale-kv")], "caught 0 of 1 faults", False),
        ([row("healthy", "FAIL")], "caught 0 of 0 faults; 1 false alarms in 2 healthy", False),
        ([row("healthy", "INCONCLUSIVE")], "caught 0 of 0 faults; 0 false alarms in 2 healthy", False),
        ([row("harmless", "FAIL", "stale-kv")], "caught 0 of 0 faults; 1 false alarms in 2 healthy", False),
    ],
)
def test_the_closing_line_counts_what_it_says(rows: list[Outcome], line: str, good: bool) -> None:
    said, passes = closing([*rows, row("healthy", "EXACT")])
    assert said.startswith(line) and passes is good


def test_a_fault_that_only_float32_shows_is_not_asked_of_bfloat16() -> None:
    fault = next(iter(FLOAT32_ONLY))
    rows = [row("faults", "FAIL", fault), row("bfloat16", "NEAR-TIE", fault), row("healthy", "EXACT")]
    assert closing(rows)[1]
    assert FLOAT32_ONLY[fault] in render(rows)


def test_the_full_form_plants_every_fault_and_runs_two_hundred_healthy_ones() -> None:
    jobs = list(full())
    for section in ("faults", "replay", "bfloat16"):
        assert {case.fault for job in jobs if job.section == section for case in job.cases} == set(Fault)
    healthy = [case for job in jobs if job.section == "healthy" for case in job.cases]
    assert len(healthy) == len(set(healthy)) == 200 and {case.dtype for case in healthy} == {"float32", "bfloat16"}
    assert len(FAULTS) >= 24 and all(reason for _, _, reason in HARMLESS)


def test_a_method_is_credited_with_what_it_caught_itself() -> None:
    """Given a replay whose verdict fails by structure alone, replay gets no mark."""
    caught = row("faults", "FAIL", "budget-clamped", caught_by=["golden", "structure"])
    replayed = row("replay", "FAIL", "budget-clamped", caught_by=["structure"])
    told = next(line for line in render([caught, replayed, row("healthy", "EXACT")]).splitlines() if "clamped" in line)
    assert told.count(" x ") == 2
