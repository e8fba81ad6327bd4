"""A client that is interrupted, cut off or killed in the middle of a deploy, over real ssh to a real host."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .harness import TestHost
from .machine import wait_for
from .test_main_job import SERVICE, Workspace, server_info, with_short_gate

LEASE_S = 60


@pytest.fixture
def deployed(ct200: TestHost, tmp_path: Path) -> Iterator[Workspace]:
    """8/4 runs and is proven."""
    ct200.reset()
    workspace = with_short_gate(tmp_path, {ct200: "root"})
    workspace.ddtree("deploy", "--host", "ct200", "--yes", "--no-snapshot")
    yield workspace
    ct200.uncut()


def deploy(workspace: Workspace, at: str, act: Callable[[subprocess.Popen[str]], object]) -> tuple[int, str]:
    """Deploy 16/4; ``act`` once stderr shows a line with ``at``. Exit code and stderr."""
    words = ["deploy", "--host", "ct200", "--profile", "b16k4", "--yes", "--no-snapshot"]
    client = subprocess.Popen(
        [sys.executable, "-m", "ddtree_ops.cli", *words],
        cwd=workspace.path,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=workspace.environment,
    )
    assert client.stderr is not None
    said, beside = [], None
    for line in client.stderr:
        said.append(line)
        if at in line and beside is None:
            beside = threading.Thread(target=lambda: (time.sleep(1), act(client)))
            beside.start()
    assert beside is not None, said
    beside.join()
    return client.wait(), "".join(said)


def budget(host: TestHost) -> int:
    return int(server_info(host)["speculative_ddtree_budget"])


@pytest.mark.hosts
@pytest.mark.timeout(900)
@pytest.mark.parametrize("at", ["starting", "proving"])
def test_ctrl_c_ends_when_the_host_is_back(ct200: TestHost, deployed: Workspace, at: str) -> None:
    code, said = deploy(deployed, at, lambda client: client.send_signal(signal.SIGINT))
    assert code == 130 and "back on generation 1" in said
    assert budget(ct200) == 8
    deployed.ddtree("plan", "--host", "ct200")


@pytest.mark.hosts
@pytest.mark.timeout(900)
def test_a_link_cut_for_a_while_does_not_end_the_deploy(ct200: TestHost, deployed: Workspace) -> None:
    def cut(_: object) -> None:
        ct200.cut()
        time.sleep(15)
        ct200.uncut()

    code, said = deploy(deployed, "proving", cut)
    assert code == 0, said
    assert budget(ct200) == 16
    deployed.ddtree("plan", "--host", "ct200", "--profile", "b16k4")


@pytest.mark.hosts
@pytest.mark.timeout(900)
def test_a_killed_client_is_outlived(ct200: TestHost, deployed: Workspace) -> None:
    """Meanwhile others are told who is at it, and nobody is told that the unproven is proven."""
    code, _ = deploy(deployed, "proving", lambda client: client.kill())
    assert code == -signal.SIGKILL
    status = deployed.json("status", "--host", "ct200")["hosts"][0]["status"]
    assert status["verdict"] == "UNPROVEN" and status["drift"] == []
    assert "is being deployed by" in deployed.ddtree("deploy", "--host", "ct200", "--yes", code=7).stderr
    wait_for("the lease to end", lambda: not unfinished(ct200), LEASE_S + 60)
    assert budget(ct200) == 8
    deployed.ddtree("plan", "--host", "ct200")


def unfinished(host: TestHost) -> bool:
    return '"pending": null' not in host.sh(f"cat /opt/ddtree/services/{SERVICE}/state.json")
