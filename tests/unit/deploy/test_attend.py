"""Once a plan is handed over, the journal alone says how it ended, whatever goes wrong on the client's side.

The host is a directory, the agent and its applier are real processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddtree_ops.deploy.attend import Attendance
from ddtree_ops.deploy.follow import STOOD_S, Follower
from ddtree_ops.deploy.session import Session
from ddtree_ops.errors import Failed, Interrupted, Unreachable
from ddtree_ops.exactness import Verdict
from ddtree_ops.model import init_workspace, load_workspace, resolve
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.transport import Transport, connect
from tests.unit.host.box import Box, box_in

Prove = Callable[[Transport], Verdict | None]


class Quiet:
    """A Ui that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def progress(self, label: str, done: int, total: int) -> None:
        """No bar."""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with box_in(tmp_path / "ddtree") as made:
        made.deploy("txn-1")
        yield made


@pytest.fixture
def session(box: Box, tmp_path: Path) -> Iterator[Session]:
    init_workspace(tmp_path)
    local = resolve(load_workspace(tmp_path), "local", None, None)
    host = msgspec.structs.replace(local.host, root=str(box.root))
    here = msgspec.structs.replace(local, host=host, service_name=box.service)
    with Session(here, connect(host)) as made:
        yield made


def attend(session: Session, sealed: dict[str, Any], prove: Prove, ui: Quiet | None = None) -> dict[str, Any]:
    """The terminal entry; a verdict of None passes."""
    passed = {"kind": "EXACT", "passed": True, "reasons": []}
    return Attendance(session, sealed, ui or Quiet(), prove=prove, for_host=lambda _: passed).run()[0]


def nothing_to_say(_: Transport) -> None:
    """A gate that passes at once."""


@contextlib.contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """``act`` in a thread beside the block."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_passing_gate_confirms(box: Box, session: Session) -> None:
    end = attend(session, box.plan("txn-2"), nothing_to_say)
    assert (end["event"], end["generation"], box.who()) == ("confirmed", 2, "txn-2")


@pytest.mark.parametrize("problem", [Failed("no such prompts"), RuntimeError("a bug")])
def test_a_gate_that_cannot_run_is_told_to_the_host(box: Box, session: Session, problem: Exception) -> None:
    """Left to itself the host would serve the unproven until the lease ends, and the exit code would say unchanged."""

    def broken(_: Transport) -> None:
        raise problem

    end = attend(session, box.plan("txn-2"), broken)
    assert end["event"] == "recovered" and "the gate could not run" in end["reason"] and str(problem) in end["reason"]
    assert box.who() == "txn-1"


def test_ctrl_c_does_not_wait_for_a_long_load(box: Box, session: Session) -> None:
    def later() -> None:
        box.wait("txn-2", "health", "begin")
        press_ctrl_c()

    began = time.monotonic()
    with meanwhile(later), pytest.raises(Interrupted, match="back on generation 1"):
        attend(session, box.plan("txn-2", engine={"who": "txn-2", "load": "15"}), nothing_to_say)
    assert time.monotonic() - began < 14
    assert box.who() == "txn-1"


def test_ctrl_c_while_the_plan_is_handed_over_is_not_lost(box: Box, session: Session) -> None:
    """The request is under way: what it starts must be followed to its end, not left behind."""

    def at_once() -> None:
        box.wait("txn-2", "accept")
        press_ctrl_c()

    with meanwhile(at_once), pytest.raises(Interrupted):
        attend(session, box.plan("txn-2"), nothing_to_say)
    assert box.probe()["state"] == {"confirmed": 1, "pending": None}
    assert box.who() == "txn-1"


def test_unlocked_by_another_it_ends_as_the_journal_says(box: Box, session: Session) -> None:
    def unlocked(_: Transport) -> None:
        box.call("unlock", reason="mine now")

    end = attend(session, box.plan("txn-2"), unlocked)
    assert end["event"] == "recovered" and "mine now" in end["reason"]


def test_a_killed_applier_is_recovered_by_who_attends(box: Box, session: Session) -> None:
    def killed(_: Transport) -> None:
        os.kill(box.applier(), signal.SIGKILL)

    ui = Quiet()
    end = attend(session, box.plan("txn-2"), killed, ui)
    assert (end["event"], end["generation"], box.who()) == ("recovered", 1, "txn-1")
    assert any("applier is gone" in line for line in ui.said)


def test_a_host_that_restarts_before_it_accepted_the_plan_changed_nothing(box: Box, session: Session) -> None:
    """The journal has the beginning, the state nothing, and our first connection died with the host."""
    plan = box.plan("txn-2")
    with Follower(
        lambda: connect(session.deployment.host),
        root=str(box.root),
        service=box.service,
        supervisor=box.supervisor,
        unit_dir=box.unit_dir,
        txn="txn-2",
        lease_s=20,
        give_up_s=60,
        elevates=session.agent.elevates,
    ) as ear:
        (box.dir / "txn" / "txn-2").mkdir(parents=True)
        with (box.dir / "journal.jsonl").open("a") as journal:
            journal.write('{"t": 1, "txn": "txn-2", "step": "accept", "event": "begin"}\n')
        attendance = Attendance(dead_link(session), plan, Quiet(), prove=nothing_to_say, for_host=lambda _: {})
        end = attendance._attend(ear, interrupt=False)
    assert (end["event"], end["generation"]) == ("unchanged", 1)
    assert box.entries("txn-2")[-1]["event"] == "unchanged"


def dead_link(session: Session) -> Session:
    """Its transport is lost until it is dialled again."""

    class Dead(Session):
        lost = True

        def reconnect(self) -> None:
            super().reconnect()
            self.lost = False

        @property
        def agent(self) -> Agent:  # type: ignore[override]
            if self.lost:
                raise Unreachable("the connection is lost")
            return self._agent

        @agent.setter
        def agent(self, made: Agent) -> None:
            self._agent = made

    return Dead(session.deployment, session.transport)


def test_decided_while_the_link_was_away_it_ends_as_the_journal_says(box: Box, session: Session) -> None:
    """The gate must not be begun anew against whatever runs by then."""
    begun = 0

    def cut(_: Transport) -> None:
        nonlocal begun
        begun += 1
        box.call("unlock", reason="mine now")
        time.sleep(2)
        raise Unreachable("cut")

    end = attend(session, box.plan("txn-2"), cut)
    assert end["event"] == "recovered" and begun == 1


def test_a_refused_plan_changed_nothing(box: Box, session: Session) -> None:
    with pytest.raises(Failed, match="moved"):
        attend(session, box.plan("txn-2", expect={**box.expectation(box.probe()), "unit_sha256": "0"}), nothing_to_say)
    assert box.who() == "txn-1"


def follower(box: Box, session: Session, txn: str, dial: Callable[[], Transport], give_up_s: float) -> Follower:
    return Follower(
        dial,
        root=str(box.root),
        service=box.service,
        supervisor=box.supervisor,
        unit_dir=box.unit_dir,
        txn=txn,
        lease_s=20,
        give_up_s=give_up_s,
        elevates=session.agent.elevates,
    )


def test_a_cut_after_a_silent_load_is_dialled_again(box: Box, session: Session) -> None:
    """A model loads for many minutes without a journal entry; the first cut after it is not the end."""
    dialled = 0

    def dial() -> Transport:
        nonlocal dialled
        dialled += 1
        if dialled == 2:
            raise Unreachable("cut")
        return connect(session.deployment.host)

    box.call("apply", plan=box.plan("txn-2", engine={"who": "txn-2", "sick": ""}))
    give_up = STOOD_S / 2
    with follower(box, session, "txn-2", dial, give_up) as ear:
        while ear.next()["step"] != "health":
            pass
        time.sleep(STOOD_S + 0.5)
        (stream,) = [pid for pid in box.supervisors() if b"follow" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(stream, signal.SIGKILL)
        box.verdict("txn-2", passed=False)
        while (entry := ear.next())["step"] != "end":
            pass
    assert entry["event"] == "recovered" and dialled == 3


def test_a_follower_that_breaks_is_heard(box: Box, session: Session) -> None:
    def dial() -> Transport:
        raise OSError("no file descriptors left")

    with follower(box, session, "txn-1", dial, 60) as ear, pytest.raises(OSError, match="descriptors"):
        ear.next()
