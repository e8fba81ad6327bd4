"""A sweep on a real host over ssh: its client is killed inside a cell, the host goes back, the same command goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_ops.sweep.records import JOURNAL, Attempt, Ended, Measured, Started, read

from .harness import TestHost
from .machine import wait_for
from .test_broken_clients import LEASE_S, budget, unfinished
from .test_main_job import SERVICE, Workspace

#: One shape, other than the one that runs: two cells a start and, as it is compared with nothing, two starts.
WISHES = ("--pair", "16/4", "--no-ar", "--no-chain", "-c", "1,2", "--max-tokens", "32", "--rows", "8", "--yes")
CELLS = {(start, concurrency) for start in (1, 2) for concurrency in (1, 2)}


@pytest.mark.hosts
@pytest.mark.timeout(1500)
def test_a_killed_sweep_leaves_the_host_as_it_was_and_goes_on(ct200: TestHost, tmp_path: Path) -> None:
    ct200.reset()
    workspace = Workspace(tmp_path, {ct200: "root"}, base="short")
    gate = {"max_new_tokens": 16, "concurrency": [1, 2]}
    workspace.profile("short", extends="tiny", min_accept_length=None, exactness=gate)
    workspace.ddtree("deploy", "--host", "ct200", "--yes")
    assert budget(ct200) == 8

    # killed in its second cell, while the host serves the shape that is measured
    run = tmp_path / "sweeps" / "run"
    sweep = ("sweep", "--host", "ct200", *WISHES, "--run", str(run))
    client = subprocess.Popen(
        [sys.executable, "-m", "ddtree_ops.cli", *sweep],
        cwd=workspace.path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=workspace.environment,
    )
    while not any(isinstance(record, Measured) for record in read(run / JOURNAL)) and client.poll() is None:
        time.sleep(0.05)
    client.kill()
    assert client.wait() == -signal.SIGKILL
    kept = read(run / JOURNAL)
    assert [type(record) for record in kept[-3:]] == [Attempt, Started, Measured]
    assert budget(ct200) == 16 and unfinished(ct200)

    # nobody comes back: the host does, by itself
    wait_for("the lease to end", lambda: not unfinished(ct200), LEASE_S + 60)
    assert budget(ct200) == 8
    workspace.ddtree("plan", "--host", "ct200")

    # the same command again: what was measured stands, what is left is measured, each cell once
    workspace.ddtree(*sweep, timeout=900)
    records = read(run / JOURNAL)
    assert records[: len(kept)] == kept
    measured = [record for record in records if isinstance(record, Measured)]
    assert {record.status for record in measured} == {"ok"}
    assert sorted((record.cell.start, record.cell.load.concurrency) for record in measured) == sorted(CELLS)
    # fp32 and greedy: at one C every start and repeat gave the same tokens
    for concurrency in (1, 2):
        cells = [record for record in measured if record.cell.load.concurrency == concurrency]
        assert len({repeat.outputs for record in cells for repeat in record.repeats}) == 1
    assert [record.event for record in records if isinstance(record, Ended)] == ["recovered"] * 2
    (status,) = workspace.json("status", "--host", "ct200")["hosts"]
    assert (status["status"]["state"], status["status"]["verdict"]) == ("active", "EXACT")
    assert budget(ct200) == 8
    workspace.ddtree("plan", "--host", "ct200")

    # evidence: records, report and unit in one commit, the headline in its message
    (told,) = workspace.json("snapshot", "--host", "ct200", "--run", str(run))["hosts"]
    assert told["commit"] is not None
    top = f"snapshots/ct200/{SERVICE}"
    stored = set(workspace.git("show", "--format=", "--name-only", told["commit"]).split())
    assert {f"{top}/sweep/{name}" for name in (JOURNAL, "report.md", "report.html", "throughput-by-c.svg")} <= stored
    assert workspace.git("show", f"{told['commit']}:{top}/sweep/{JOURNAL}") == (run / JOURNAL).read_text()
    assert "Fastest measured: C=1 b16k4" in workspace.git("log", "-1", "--format=%B")
    assert workspace.json("snapshot", "--host", "ct200", "--run", str(run))["hosts"][0]["commit"] is None
