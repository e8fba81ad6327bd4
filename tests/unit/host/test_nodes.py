"""A host that is one node of a service over several: it waits before it stops anything, and goes back by itself."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from .box import Box, Refused
from .test_deploy import stands_on


def plan(box: Box, txn: str, rank: int = 0, **more: Any) -> dict[str, Any]:
    made = box.plan(txn, together=True, **more)
    made["generation"]["meta"] = {"nodes": {"rank": rank, "set": txn}}
    return made


def deploy(box: Box, txn: str, rank: int = 0, **more: Any) -> None:
    box.call("apply", plan=plan(box, txn, rank, **more))
    box.wait(txn, "hold", "begin")
    box.call("go", txn=txn)
    box.wait(txn, "gate", "begin")


def test_nothing_stops_before_every_node_is_there(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=plan(box, "txn-2"))
    box.wait("txn-2", "hold", "begin")
    with pytest.raises(Refused, match="txn-9 is not in progress"):
        box.call("go", txn="txn-9")
    assert box.who() == "txn-1" and "stop begin" not in box.steps("txn-2")
    box.call("go", txn="txn-2")
    box.wait("txn-2", "gate", "begin")
    box.verdict("txn-2")
    assert box.end("txn-2")["event"] == "confirmed"
    stands_on(box, 2, "txn-2")


@pytest.mark.parametrize("how", ["another node failed", "nobody says go"])
def test_a_node_that_waits_in_vain_changes_nothing(box: Box, how: str) -> None:
    box.deploy("txn-1")
    pid = box.probe()["active"]["pid"]
    box.call("apply", plan=plan(box, "txn-2", lease_s=20 if how == "another node failed" else 1))
    box.wait("txn-2", "hold", "begin")
    if how == "another node failed":
        box.verdict("txn-2", passed=False)
    assert box.end("txn-2")["event"] == "unchanged"
    stands_on(box, 1, "txn-1")
    assert box.probe()["active"]["pid"] == pid


def test_a_service_on_one_host_waits_for_nobody(box: Box) -> None:
    box.deploy("txn-1")
    assert not any(step.startswith("hold") for step in box.steps("txn-1"))


@pytest.mark.parametrize(("rank", "loads"), [(0, True), (0, False), (1, False)])
def test_a_node_goes_back_though_the_others_do_not_answer(box: Box, rank: int, loads: bool) -> None:
    """An engine of several nodes answers once all of them are there: that it does not is no failed restore."""
    away = box.root / "the other node is away"
    health = {"port": box.port, "timeout_s": 3, "expect": {}, "fatal": []}
    deploy(box, "txn-1", rank, engine={"who": "txn-1", "sick_while": away}, health=health)
    box.verdict("txn-1")
    box.end("txn-1")
    deploy(box, "txn-2", rank)
    if not loads:
        away.touch()
    box.verdict("txn-2", passed=False)
    end = box.end("txn-2")
    assert (end["event"], end["generation"], end["proven"]) == ("recovered", 1, loads)
    assert box.probe()["state"] == {"confirmed": 1, "pending": None}


def test_an_applier_that_dies_while_it_waits_changed_nothing(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=plan(box, "txn-2"))
    box.wait("txn-2", "hold", "begin")
    os.kill(box.applier(), signal.SIGKILL)
    assert box.call("recover")["result"] == "unchanged"
    stands_on(box, 1, "txn-1")
