"""The real sglang-router before two engines, under load from our own client: no accepted request is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from ddtree_ops.cli.root import app
from ddtree_ops.deploy.session import open_session
from ddtree_ops.deploy.workers import workers_of
from ddtree_ops.model import Workspace, resolve
from tests.documented import documented

from ..sweep.place import processes
from .fleet import BACKENDS, CONCURRENCY, answers, door, load, serving

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def ddtree(workspace: Workspace, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document."""
    done = CliRunner().invoke(app, [*words, "--json", "--workspace", str(workspace.path)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, documented(words, done.stdout)


def generation(workspace: Workspace, name: str) -> int | None:
    with open_session(resolve(workspace, name)) as session:
        seen = session.probe()
    assert seen.state.pending is None
    return seen.state.confirmed


@contextmanager
def fewest(workspace: Workspace) -> Iterator[list[int]]:
    """How many backends the router had, looked at all the time."""
    found, over = [len(BACKENDS)], threading.Event()

    def look() -> None:
        while not over.is_set():
            found.append(len(serving(workspace)))
            over.wait(0.1)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(30)


def test_the_router_was_proven_through_itself(standing: Workspace) -> None:
    code, told = ddtree(standing, "verify-exactness", "--host", "front")
    verdict = told["hosts"][0]["verdict"]
    assert (code, verdict["kind"], verdict["algorithm"]) == (0, "EXACT", "routed")
    # a plan of what runs changes nothing
    assert ddtree(standing, "plan", "--host", "all")[0] == 0


def test_a_rolling_deploy_loses_nothing(standing: Workspace) -> None:
    with load(standing) as kept, fewest(standing) as had:
        code, told = ddtree(standing, "deploy", "--host", "engines", "--profile", "narrow", "--yes", "--no-snapshot")
    assert code == 0, told
    assert [generation(standing, name) for name in BACKENDS] == [2, 2]
    print(f"rolling deploy: {len(kept.samples)} answered, {len(kept.failed)} lost")
    assert kept.failed == [] and min(had) == 1
    assert {len(different) for different in answers(kept).values()} == {1}
    assert serving(standing) == {*BACKENDS}


def test_a_failing_deploy_loses_nothing_and_stops_the_rest(standing: Workspace) -> None:
    before = [generation(standing, name) for name in BACKENDS]
    with load(standing) as kept:
        code, told = ddtree(standing, "deploy", "--host", "engines", "--profile", "faulty", "--yes", "--no-snapshot")
    assert code == 5 and told["hosts"][1] == {"host": "two", "service": "engine", "skipped": True}
    assert [generation(standing, name) for name in BACKENDS] == before
    print(f"failing deploy: {len(kept.samples)} answered, {len(kept.failed)} lost")
    assert kept.failed == []
    # nobody met the server that answers wrongly
    assert {len(different) for different in answers(kept).values()} == {1}
    assert serving(standing) == {*BACKENDS}


def test_a_backend_that_a_killed_client_left_out_is_put_back(standing: Workspace) -> None:
    (front,) = resolve(standing, "one").fronts
    with workers_of(front.deployment) as workers:
        assert workers.remove(front.url) and not workers.remove(front.url)
    assert serving(standing) == {"two"}
    code, told = ddtree(standing, "deploy", "--host", "one", "--profile", "narrow", "--yes", "--no-snapshot")
    assert code == 0 and told["hosts"][0]["outcome"]["result"] == "unchanged"
    assert serving(standing) == {*BACKENDS}


def test_the_router_goes_back_to_its_generation_before(standing: Workspace) -> None:
    """Another policy is another generation; a rollback passes the gate through the router."""
    file = standing.path / "inventories" / "front.yaml"
    text = file.read_text()
    file.write_text(text.replace("round_robin", "random"))
    try:
        code, told = ddtree(standing, "deploy", "--host", "front", "--yes", "--no-snapshot")
        assert code == 0 and told["hosts"][0]["outcome"]["verdict"]["kind"] == "EXACT"
        assert generation(standing, "front") == 2
        code, told = ddtree(standing, "rollback", "--host", "front", "--yes")
        assert code == 0 and told["hosts"][0]["outcome"]["verdict"]["kind"] == "EXACT"
        assert generation(standing, "front") == 1
    finally:
        file.write_text(text)
    assert httpx.get(f"{door(standing)}/readiness").json()["healthy_workers"] == 2


def test_a_backend_that_dies_costs_what_it_was_answering(standing: Workspace) -> None:
    with load(standing) as kept:
        until = time.monotonic() + 3
        for pid in processes(Path(standing.hosts["one"].root)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while time.monotonic() < until or serving(standing) != {"two"}:
            time.sleep(0.1)
    print(f"a backend killed: {len(kept.samples)} answered, {len(kept.failed)} lost of {CONCURRENCY} in flight")
    # only answers that had begun there: what had not was tried again elsewhere
    assert len(kept.failed) <= CONCURRENCY and set(kept.failed) <= {"the server closed the connection"}
    # and no other is taken away now: nothing is changed
    before = generation(standing, "two")
    code, told = ddtree(standing, "deploy", "--host", "two", "--profile", "ar", "--yes", "--no-snapshot")
    assert code == 1 and "max_unavailable is 1" in told["hosts"][0]["error"]["message"]
    assert generation(standing, "two") == before and serving(standing) == {"two"}
    code, told = ddtree(standing, "deploy", "--host", "one", "--profile", "narrow", "--yes", "--no-snapshot")
    assert code == 0, told
    assert serving(standing) == {*BACKENDS}
