"""Given a host without systemd, a deploy ends on the new engine or on the one before, and the journal says which."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from .box import SECRET, Box, Refused

STEPS = ("accept", "generation", "verify-unit", "stop", "switch", "start", "health", "gate", "confirm")
LISTEN = """
import socket, time
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1], flush=True)
time.sleep(60)
"""
INFO = json.dumps({"tp_size": 2, "speculative_algorithm": "DDTREE"})


def stands_on(box: Box, n: int | None, who: str | None) -> None:
    """The host is settled on that generation, nothing of the deploy is left."""
    seen = box.probe()
    assert seen["state"] == {"confirmed": n, "pending": None}
    assert (seen["unfinished"], seen["drift"]) == (None, [])
    assert seen["lock"] is None or not seen["lock"]["alive"]
    assert box.who() == who
    assert len(box.supervisors()) == (0 if who is None else 1)
    assert len(box.members()) == (0 if who is None else 1)
    assert not (box.dir / ".reserve").exists()


def test_deploy_confirms_and_a_second_one_replaces_it(box: Box) -> None:
    end = box.deploy("txn-1")
    assert (end["event"], end["generation"], end["downtime_s"]) == ("confirmed", 1, None)
    seen = box.probe()
    assert seen["active"]["state"] == "active"
    assert seen["port_owner"]["ours"]
    assert seen["unit"]["sha256"] == seen["generation"]["files"]["process.json"]
    assert seen["verdict"]["kind"] == "EXACT"
    end = box.deploy("txn-2", engine={"who": "txn-2", "info": INFO}, wanted={"tp_size": 2, "absent": None})
    assert (end["event"], end["generation"]) == ("confirmed", 2)
    assert 0 < end["downtime_s"] < 20
    stands_on(box, 2, "txn-2")
    assert box.steps("txn-2") == [
        *(f"{step} {event}" for step in STEPS for event in ("begin", "done")),
        "end confirmed",
    ]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"sick": 1}, "not healthy within 3 s: /health answered 503"),
        ({"info": '{"tp_size": 4}'}, "tp_size: wanted 2, got 4"),
        ({"info": '{"tp_size": true}'}, "tp_size: wanted 2, got true"),
        ({"say": "FATAL the model is gone", "sick": 1}, "fatal line in its log: FATAL the model is gone"),
        ({"exit": 0}, "the service ended (inactive"),
        ({"exit": 3}, "crash loop: 3 restarts"),
    ],
)
def test_a_bad_engine_gives_way_to_the_one_before(box: Box, engine: dict[str, Any], reason: str) -> None:
    box.deploy("txn-1")
    limit = 3 if "sick" in engine else 20
    health = {"port": box.port, "timeout_s": limit, "expect": {"tp_size": 2}, "fatal": ["^FATAL"]}
    end = box.deploy("txn-2", engine=engine, health=health)
    assert end["event"] == "recovered"
    assert reason in end["reason"]
    assert end["downtime_s"] > 0
    stands_on(box, 1, "txn-1")
    evidence = box.dir / "generations" / "2" / "evidence" / "txn-2"
    assert json.loads((evidence / "why.json").read_text())["reason"] == end["reason"]
    assert "hidden: <redacted>" in (evidence / "log.txt").read_text()


def test_a_failed_verdict_restores(box: Box) -> None:
    box.deploy("txn-1")
    end = box.deploy("txn-2", passed=False)
    assert (end["event"], end["generation"]) == ("recovered", 1)
    assert "the verdict is FAIL" in end["reason"]
    stands_on(box, 1, "txn-1")


def test_a_first_deploy_that_fails_leaves_nothing(box: Box) -> None:
    end = box.deploy("txn-1", passed=False, engine={"who": "txn-1", "orphan": 1})
    assert (end["event"], end["generation"]) == ("recovered", None)
    stands_on(box, None, None)
    assert not (box.dir / "process.json").exists()


def test_an_engine_that_dies_while_it_is_proven_restores(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    box.wait("txn-2", "gate", "begin")
    os.kill(box.probe()["active"]["pid"], signal.SIGKILL)
    assert "died after it was healthy" in box.end("txn-2")["reason"]
    stands_on(box, 1, "txn-1")


def test_the_lease_runs_out_without_a_follower_and_is_kept_by_one(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2", lease_s=1.5))
    assert "lease of 1.5 s" in box.end("txn-2")["reason"]
    stands_on(box, 1, "txn-1")
    box.call("apply", plan=box.plan("txn-3", lease_s=1.5))
    follow = subprocess.Popen(box.cli("follow", "--txn", "txn-3"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert follow.stdin is not None
    assert follow.stdout is not None
    for _ in range(12):
        time.sleep(0.3)
        follow.stdin.write(b".\n")
        follow.stdin.flush()
    assert box.steps("txn-3")[-1] == "gate begin"
    box.verdict("txn-3")
    lines = [json.loads(line) for line in follow.stdout]
    assert lines == box.entries("txn-3")
    assert follow.wait(5) == 0
    stands_on(box, 3, "txn-3")
    again = subprocess.run(
        box.cli("follow", "--txn", "txn-3", "--offset", "3"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=9,
        check=True,
    )
    assert [json.loads(line) for line in again.stdout.splitlines()] == lines[3:]


def test_the_lease_is_kept_on_a_full_disk(box: Box) -> None:
    """The follower may not write a byte to any file; renewing needs none."""
    box.call("apply", plan=box.plan("txn-1", lease_s=4))
    follow = subprocess.Popen(
        ["prlimit", "--fsize=0", *box.cli("follow", "--txn", "txn-1")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert follow.stdin is not None
    for _ in range(12):  # half as long again as the lease
        time.sleep(0.5)
        follow.stdin.write(b".\n")
        follow.stdin.flush()
    assert box.steps("txn-1")[-1] == "gate begin"
    box.verdict("txn-1")
    assert follow.wait(9) == 0 and box.end("txn-1")["event"] == "confirmed"


def test_the_hard_deadline_ends_a_deploy_without_a_verdict(box: Box) -> None:
    health = {"port": box.port, "timeout_s": 2, "expect": {}, "fatal": []}
    box.call("apply", plan=box.plan("txn-1", health=health, stop_timeout_s=1, gate_timeout_s=1))
    assert "no verdict within 4 s" in box.end("txn-1")["reason"]
    stands_on(box, None, None)


def test_a_server_that_drips_bytes_does_not_hold_up_the_limits(box: Box) -> None:
    health = {"port": box.port, "timeout_s": 3, "expect": {}, "fatal": []}
    began = time.monotonic()
    end = box.deploy("txn-1", engine={"drip": 1}, health=health)
    assert "TimeoutError" in end["reason"]
    assert time.monotonic() - began < 20


def test_unlock_ends_a_live_deploy(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    box.wait("txn-2", "gate", "begin")
    seen = box.probe()
    assert (seen["lock"]["alive"], seen["lock"]["txn"], seen["lock"]["who"]) == (True, "txn-2", "ann")
    assert seen["unfinished"] == "txn-2"
    assert seen["lock"]["what"] == "deploy to generation 2" and seen["lock"]["client"] == "desk"
    assert box.call("unlock", reason="lunch", who="bob", client="sofa")["released"]
    assert box.end("txn-2")["reason"] == "gate: told to stop by bob from sofa: unlocked: lunch"
    stands_on(box, 1, "txn-1")
    with pytest.raises(Refused, match="not in progress"):
        box.verdict("txn-2")


def test_of_two_deploys_at_once_one_is_locked_out(box: Box) -> None:
    plans = [box.plan("txn-a"), box.plan("txn-b")]
    outcomes: list[str] = []

    def start(plan: dict[str, object]) -> None:
        try:
            box.call("apply", plan=plan)
            outcomes.append("accepted")
        except Refused as refused:
            outcomes.append(refused.kind)

    threads = [threading.Thread(target=start, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) in (["accepted", "locked"], ["accepted", "refused"])
    winner = "txn-a" if box.entries("txn-a") else "txn-b"
    box.wait(winner, "gate", "begin")
    with pytest.raises(Refused) as locked:
        box.call("apply", plan={**plans[0], "txn": "txn-c"})
    assert locked.value.kind == "locked"
    box.verdict(winner)
    assert box.end(winner)["event"] == "confirmed"
    stands_on(box, 1, winner)


def test_a_plan_is_refused_when_the_host_moved(box: Box) -> None:
    plan = box.plan("txn-2")
    box.deploy("txn-1")
    with pytest.raises(Refused) as moved:
        box.call("apply", plan=plan)
    assert moved.value.kind == "moved"
    assert len(moved.value.error["moved"]) == 3  # state, unit, next generation
    assert box.entries("txn-2") == []


def test_an_edit_on_the_host_needs_overwrite(box: Box) -> None:
    box.deploy("txn-1")
    switch = box.dir / "process.json"
    switch.write_text(switch.read_text() + "\n")
    assert box.probe()["drift"] == ["the unit was edited"]
    with pytest.raises(Refused, match="the unit was edited"):
        box.call("apply", plan=box.plan("txn-2"))
    assert box.deploy("txn-3", overwrite=True, passed=False)["event"] == "recovered"
    stands_on(box, 1, "txn-1")
    assert (box.dir / "txn" / "txn-3" / "overwritten" / "process.json").read_text().endswith("\n")


def test_a_port_of_somebody_else_is_refused_before_anything_stops(box: Box) -> None:
    box.deploy("txn-1")
    plan = box.plan("txn-2")
    plan["health"]["port"] = 0
    with pytest.raises(Refused, match="from 1 to 65535"):
        box.call("apply", plan=plan)
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        plan["health"]["port"] = int(other.stdout.readline())
        with pytest.raises(Refused, match="is taken by python"):
            box.call("apply", plan=plan)
        other.kill()
    stands_on(box, 1, "txn-1")


def test_rollback_goes_through_the_same_gate(box: Box) -> None:
    box.deploy("txn-1")
    box.deploy("txn-2")
    end = box.deploy("txn-3", action="rollback", generation=None, target=1)
    assert (end["event"], end["generation"]) == ("confirmed", 1)
    stands_on(box, 1, "txn-1")
    told = box.call("history")
    assert [(row["txn"], row["end"], row["action"]) for row in told["history"]] == [
        ("txn-3", "confirmed", "rollback"),
        ("txn-2", "confirmed", "deploy"),
        ("txn-1", "confirmed", "deploy"),
    ]
    assert [(row["n"], row["confirmed"]) for row in told["generations"]] == [(1, True), (2, True)]
    with pytest.raises(Refused, match="generation 7 is missing"):
        box.call("apply", plan=box.plan("txn-4", action="rollback", generation=None, target=7))


@pytest.mark.parametrize("name", ["process.json", "profile.json"])
def test_a_damaged_generation_is_no_target(box: Box, name: str) -> None:
    """What would be installed is not what was proven: refused while the service runs on."""
    box.deploy("txn-1")
    box.deploy("txn-2")
    kept = box.dir / "generations" / "1" / name
    kept.write_text(kept.read_text() + " ")
    with pytest.raises(Refused, match=f"{name} of generation 1 was edited"):
        box.call("apply", plan=box.plan("txn-3", action="rollback", generation=None, target=1))
    stands_on(box, 2, "txn-2")


def test_an_edited_file_of_the_generation_is_drift(box: Box) -> None:
    """The unit names the environment file there: an edit of it works from the next restart on."""
    box.deploy("txn-1")
    kept = box.dir / "generations" / "1" / "profile.json"
    kept.write_text("{} ")
    assert box.probe()["drift"] == ["profile.json of generation 1 was edited or is gone"]
    with pytest.raises(Refused, match="was edited or is gone"):
        box.call("apply", plan=box.plan("txn-2"))
    assert box.deploy("txn-3", overwrite=True)["event"] == "confirmed"
    stands_on(box, 2, "txn-3")


def test_a_short_look_is_journaled_and_stands_for_nothing(box: Box) -> None:
    box.deploy("txn-1")
    verdict = {"passed": True, "kind": "EXACT", "reasons": []}
    box.call("record", n=1, verdict=verdict, who="ann", client="desk", note="short self-score")
    assert box.probe()["verified"] is None
    assert box.call("history")["history"][0]["reason"] == "short self-score: EXACT"


def test_the_last_downtime_is_told(box: Box) -> None:
    box.deploy("txn-1")
    assert box.probe()["last_downtime_s"] is None
    end = box.deploy("txn-2")
    assert box.probe()["last_downtime_s"] == end["downtime_s"] > 0


def test_a_stopped_service_stays_stopped_when_a_deploy_fails(box: Box) -> None:
    box.deploy("txn-1")
    box.call("stop")
    assert box.who() is None
    end = box.deploy("txn-2", passed=False)
    assert (end["event"], end["generation"], end["proven"]) == ("recovered", 1, False)
    stands_on(box, 1, None)
    box.call("start")
    box.deploy("txn-3")
    stands_on(box, 3, "txn-3")


def test_a_restore_that_fails_is_stuck_and_says_what_to_do(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    box.wait("txn-2", "gate", "begin")
    kept = box.dir / "generations" / "1" / "process.json"
    text = kept.read_text()
    kept.unlink()
    box.verdict("txn-2", passed=False)
    end = box.end("txn-2", timeout=60)
    assert end["event"] == "stuck"
    assert any("ddtree-host recover" in command for command in end["commands"])
    assert box.probe()["unfinished"] == "txn-2"
    with pytest.raises(Refused) as stuck:
        box.call("recover", reason="again")
    assert stuck.value.kind == "stuck"
    kept.write_text(text)
    assert box.call("recover", reason="mended")["result"] == "recovered"
    stands_on(box, 1, "txn-1")


def test_no_secret_leaves_the_host(box: Box) -> None:
    box.deploy("txn-1")
    box.deploy("txn-2", passed=False)
    replies = [box.probe(), box.call("collect"), box.call("logs", lines=500), box.call("history"), box.call("status")]
    replies.append(box.call("generation", n=2))
    assert "hidden: <redacted>" in "\n".join(replies[2]["lines"])
    assert SECRET not in json.dumps(replies)
    assert SECRET not in (box.dir / "journal.jsonl").read_text()
