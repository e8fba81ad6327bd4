"""Several nodes in one transaction end together: all on the new engine or all on the old one, or it is said.

The hosts are directories, each with its own agent and appliers as real processes.
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

from ddtree_ops.deploy.follow import Follower
from ddtree_ops.deploy.session import Session
from ddtree_ops.deploy.together import Ended, Node, Together
from ddtree_ops.errors import Failed, Interrupted, Locked, Unreachable
from ddtree_ops.exactness import Verdict
from ddtree_ops.model import init_workspace, load_workspace, resolve
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.transport import Transport, connect
from tests.unit.host.box import Box, box_in

from .test_attend import Quiet, meanwhile, press_ctrl_c

PASSED = {"kind": "EXACT", "passed": True, "reasons": []}
FAILED = {"kind": "FAIL", "passed": False, "reasons": ["one token is another"]}


class Nodes:
    """Boxes as the nodes of one service, each standing on the deploy ``txn-1``."""

    def __init__(self, boxes: list[Box], sessions: list[Session]) -> None:
        self.boxes, self.sessions, self.ui, self.gated = boxes, sessions, Quiet(), 0

    def plans(self, txn: str = "txn-2", **more: Any) -> list[dict[str, Any]]:
        made = []
        for rank, box in enumerate(self.boxes):
            plan = box.plan(txn, together=True, **more)
            plan["generation"]["meta"] = {"nodes": {"rank": rank}}
            made.append(plan)
        return made

    def run(
        self,
        plans: list[dict[str, Any]],
        verdict: dict[str, Any] = PASSED,
        gate: Callable[[], object] = lambda: None,
        told: Callable[[int], object] = lambda rank: None,
    ) -> list[Ended]:
        def prove(_: Transport) -> Verdict | None:
            self.gated += 1
            gate()
            return None

        def for_hosts(rank: int, _: Verdict | None) -> dict[str, Any]:
            told(rank)
            return verdict

        nodes = [Node(*pair) for pair in zip(self.sessions, plans, strict=True)]
        return Together(nodes, self.ui, prove=prove, for_hosts=for_hosts).run()[0]

    def who(self) -> list[str | None]:
        return [box.who() for box in self.boxes]

    def kill_other(self) -> None:
        """The engine of the second node dies; its host is done with that before this returns."""
        os.kill(self.boxes[1].probe()["active"]["pid"], signal.SIGKILL)
        self.boxes[1].end("txn-2")

    def undisturbed(self) -> bool:
        """Whether no node stopped what it ran."""
        return not any("stop begin" in box.steps("txn-2") for box in self.boxes)


@contextlib.contextmanager
def nodes_in(folder: Path, count: int) -> Iterator[Nodes]:
    init_workspace(folder)
    local = resolve(load_workspace(folder), "local", None, None)
    with contextlib.ExitStack() as stack:
        boxes, sessions = [], []
        for rank in range(count):
            box = stack.enter_context(box_in(folder / f"node{rank}"))
            box.deploy("txn-1")
            host = msgspec.structs.replace(local.host, root=str(box.root), name=f"node{rank}")
            here = msgspec.structs.replace(local, host=host, service_name=box.service)
            boxes.append(box)
            sessions.append(stack.enter_context(Session(here, connect(host))))
        yield Nodes(boxes, sessions)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Nodes]:
    with nodes_in(tmp_path, 2) as made:
        yield made


def events(ends: list[Ended]) -> list[str]:
    return [str(one.end.get("event")) for one in ends]


def test_all_confirm_rank_0_last(tmp_path: Path) -> None:
    with nodes_in(tmp_path, 3) as three:
        ends = three.run(three.plans())
        assert events(ends) == ["confirmed"] * 3 and three.who() == ["txn-2"] * 3 and three.gated == 1
        confirmed = [box.wait("txn-2", "confirm", "done")["t"] for box in three.boxes]
        assert max(confirmed[1:]) <= confirmed[0]
        # nobody stopped before everybody had all that it needed
        holds = [box.wait("txn-2", "hold", "begin")["t"] for box in three.boxes]
        assert min(box.wait("txn-2", "stop", "begin")["t"] for box in three.boxes) >= max(holds)


def test_a_verdict_that_is_no_pass_brings_all_back(two: Nodes) -> None:
    ends = two.run(two.plans(), FAILED)
    assert events(ends) == ["recovered"] * 2 and two.who() == ["txn-1"] * 2
    assert "the verdict is FAIL" in ends[0].end["reason"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_does_not_start_brings_all_back(two: Nodes, failing: int) -> None:
    plans = two.plans()
    plans[failing] = two.boxes[failing].plan("txn-2", together=True, engine={"who": "txn-2", "exit": "3"})
    ends = two.run(plans)
    assert events(ends) == ["recovered"] * 2 and two.who() == ["txn-1"] * 2 and two.gated == 0
    assert f"node{failing}: " in ends[1 - failing].end["reason"]


@pytest.mark.parametrize("refusing", [0, 1])
def test_where_one_host_refuses_the_plan_none_stops_anything(two: Nodes, refusing: int) -> None:
    plans = two.plans()
    plans[refusing]["expect"]["unit_sha256"] = "0"
    ends = two.run(plans)
    assert isinstance(ends[refusing].error, Failed) and "moved" in ends[refusing].error.message
    assert events(ends)[1 - refusing] == "unchanged" and two.undisturbed() and two.who() == ["txn-1"] * 2


def test_where_another_deploy_runs_on_one_node_none_stops_anything(two: Nodes) -> None:
    plans = two.plans()
    two.boxes[1].call("apply", plan=two.boxes[1].plan("txn-9", together=True))
    ends = two.run(plans)
    assert isinstance(ends[1].error, Locked) and events(ends)[0] == "unchanged" and two.undisturbed()
    two.boxes[1].verdict("txn-9", passed=False)
    two.boxes[1].end("txn-9")


def test_an_applier_that_dies_while_it_holds_leaves_all_as_they_were(two: Nodes) -> None:
    plans, other = two.plans(), two.boxes[1]

    def kill() -> None:
        other.wait("txn-2", "accept", "done")
        os.kill(other.applier(), signal.SIGKILL)

    with meanwhile(kill):
        ends = two.run(plans)
    # whichever came first, that it held or that it was killed, they end on the same engine
    assert set(events(ends)) <= {"unchanged", "recovered"} and two.who() == ["txn-1"] * 2


@pytest.mark.parametrize("dying", [0, 1])
def test_an_applier_that_dies_during_the_gate_brings_all_back(two: Nodes, dying: int) -> None:
    ends = two.run(two.plans(), gate=lambda: os.kill(two.boxes[dying].applier(), signal.SIGKILL))
    assert events(ends) == ["recovered"] * 2 and two.who() == ["txn-1"] * 2, [one.error for one in ends]


def test_an_engine_that_dies_during_the_gate_brings_all_back(two: Nodes) -> None:
    ends = two.run(two.plans(), gate=two.kill_other)
    assert events(ends) == ["recovered"] * 2 and two.who() == ["txn-1"] * 2
    assert "node1: gate: the service died after it was healthy" in ends[0].end["reason"]


def test_a_host_that_is_slow_to_tell_its_reason_is_heard(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its applier is seen to be gone before its last words are here."""
    prompt = Together._watcher

    def slow(together: Together, rank: int) -> Callable[[dict[str, Any]], None]:
        saw = prompt(together, rank)

        def late(entry: dict[str, Any]) -> None:
            if rank == 1 and (entry.get("event") == "fail" or entry.get("step") == "recover"):
                time.sleep(2)
            saw(entry)

        return late

    monkeypatch.setattr(Together, "_watcher", slow)
    ends = two.run(two.plans(), gate=two.kill_other)
    assert "node1: gate: the service died after it was healthy" in ends[0].end["reason"]


@pytest.mark.parametrize("during", ["health", "gate"])
def test_ctrl_c_brings_all_back(two: Nodes, during: str) -> None:
    load = {"who": "txn-2", "load": "6" if during == "health" else "0"}

    def later() -> None:
        for box in two.boxes:
            box.wait("txn-2", during, "begin")
        press_ctrl_c()

    pressed = threading.Event()
    with meanwhile(lambda: (later(), pressed.set())):
        ends = two.run(two.plans(engine=load), gate=lambda: pressed.wait(20) and time.sleep(1))
    assert isinstance(ends[0].error, Interrupted) and two.who() == ["txn-1"] * 2
    assert "by the operator" in ends[1].end["reason"]


class Cut:
    """A session whose link is gone for good once rank 1's verdict is made; its lease is not renewed any more either."""

    def __init__(self, session: Session, name: str) -> None:
        self.deployment, self.transport, self._agent, self.name = (
            session.deployment,
            session.transport,
            session.agent,
            name,
        )
        self.cut = False

    @property
    def agent(self) -> Agent:
        if self.cut:
            raise Unreachable("the cable is cut")
        return self._agent

    def reconnect(self) -> None:
        raise Unreachable("the cable is cut")

    def for_hosts(self, rank: int, _: Verdict | None) -> dict[str, Any]:
        self.cut = self.cut or rank == 1
        return PASSED

    def beat(self, follower: Any, process: Any, done: threading.Event) -> None:
        mine = self.name in " ".join(follower._argv)
        while not done.wait(0.5):
            if not (mine and self.cut):
                process.write(b".\n")


@pytest.mark.parametrize(
    ("cut", "ends_on"),
    [
        # the one window that is left: its lease brings it back, what was confirmed stays so, and both are told apart
        (0, ["recovered", "confirmed"]),
        # it is told first, so nobody has confirmed
        (1, ["recovered", "recovered"]),
    ],
)
def test_a_node_that_is_out_of_reach_at_the_confirm(
    two: Nodes, monkeypatch: pytest.MonkeyPatch, cut: int, ends_on: list[str]
) -> None:
    link = Cut(two.sessions[cut], f"node{cut}")
    monkeypatch.setattr(Follower, "_beat", lambda *given: link.beat(*given))
    links = [link if rank == cut else session for rank, session in enumerate(two.sessions)]
    nodes = [Node(*pair) for pair in zip(links, two.plans(lease_s=6), strict=True)]
    ends = Together(nodes, two.ui, prove=lambda _: None, for_hosts=link.for_hosts).run()[0]
    assert events(ends) == ends_on
    assert two.who() == ["txn-2" if event == "confirmed" else "txn-1" for event in ends_on]
