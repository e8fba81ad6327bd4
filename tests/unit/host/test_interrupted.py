"""Given an applier that is killed at any moment, `recover` from another process ends the deploy truthfully."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .box import Box, Refused
from .test_deploy import STEPS, stands_on

MOMENTS = [f"{step} {event}" for step in STEPS for event in ("begin", "done")]


def kill_at(box: Box, txn: str, moment: str) -> None:
    """SIGKILL the applier as soon as its journal shows that entry."""
    step, event = moment.split()
    box.wait(txn, step, event)
    holder = json.loads((box.dir / "lock").read_text() or "{}")
    if holder.get("txn") == txn:
        os.kill(holder["pid"], signal.SIGKILL)


@pytest.mark.parametrize("moment", MOMENTS)
def test_recover_ends_what_a_killed_applier_left(box: Box, moment: str) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    if MOMENTS.index(moment) > MOMENTS.index("gate begin"):
        box.wait("txn-2", "gate", "begin")
        box.verdict("txn-2")
    kill_at(box, "txn-2", moment)
    deadline = time.monotonic() + 5
    while (box.probe()["lock"] or {}).get("alive"):
        assert time.monotonic() < deadline
    box.call("recover", reason="the applier was killed")
    ends = [entry for entry in box.entries("txn-2") if entry["step"] == "end"]
    assert len(ends) == 1
    confirmed = box.probe()["state"]["confirmed"]
    assert (ends[0]["event"], ends[0]["generation"]) in [("confirmed", 2), ("recovered", 1), ("unchanged", 1)]
    assert confirmed == ends[0]["generation"]
    if moment in MOMENTS[: MOMENTS.index("gate done")]:
        assert confirmed == 1
    stands_on(box, confirmed, f"txn-{confirmed}")
    assert box.call("recover", reason="once more") == {"result": "nothing", "generation": confirmed}
    assert box.deploy("txn-3")["event"] == "confirmed"
    stands_on(box, box.probe()["state"]["confirmed"], "txn-3")


def test_a_killed_recovery_is_finished_by_the_next(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    kill_at(box, "txn-2", "gate begin")
    for moment in ("begin", None):
        recovery = subprocess.Popen(box.cli("recover"), stdout=subprocess.DEVNULL)
        if moment:
            box.wait("txn-2", "recover", moment)
        recovery.kill()
        recovery.wait()
    box.call("recover", reason="third")
    assert box.entries("txn-2")[-1]["event"] == "recovered"
    stands_on(box, 1, "txn-1")


def test_deploys_refuse_while_one_is_unfinished(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    kill_at(box, "txn-2", "gate begin")
    time.sleep(0.2)
    seen = box.probe()
    assert (seen["unfinished"], seen["lock"]["alive"]) == ("txn-2", False)
    with pytest.raises(Refused, match="unfinished"):
        box.call("apply", plan=box.plan("txn-3"))
    with pytest.raises(Refused, match="unfinished"):
        box.call("stop")
    follow = subprocess.run(box.cli("follow", "--txn", "txn-2"), capture_output=True, timeout=20, check=False)
    assert follow.returncode == 3
    assert json.loads(follow.stdout.splitlines()[-1])["event"] == "gone"
    done = subprocess.run(box.cli("recover", "--reason", "by hand"), capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["result"] == "recovered"
    stands_on(box, 1, "txn-1")


def test_a_torn_journal_is_read_and_mended(box: Box) -> None:
    box.deploy("txn-1")
    path = box.dir / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t": 1, "txn": "txn-1", "step": "g')
    assert box.probe()["journal_tail"][-1]["event"] == "confirmed"
    box.deploy("txn-2")
    lines = path.read_bytes().splitlines()
    assert path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in lines)


def test_a_journal_cut_short_after_confirm_is_completed_from_the_state(box: Box) -> None:
    box.deploy("txn-1")
    path = box.dir / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    assert box.call("recover", reason="look") == {"result": "nothing", "generation": 1}
    assert path.read_bytes().splitlines(keepends=True)[-1] == lines[-1]


def test_pending_without_a_journal_is_restored(box: Box) -> None:
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    kill_at(box, "txn-2", "gate begin")
    (box.dir / "journal.jsonl").unlink()
    assert box.call("recover", reason="the journal is lost")["result"] == "recovered"
    stands_on(box, 1, "txn-1")


def test_a_damaged_state_is_stuck_and_touches_nothing(box: Box) -> None:
    box.deploy("txn-1")
    path = box.dir / "state.json"
    path.write_text(path.read_text()[:-9])
    for verb in ("recover", "probe"):
        with pytest.raises(Refused) as stuck:
            box.call(verb)
        assert stuck.value.kind == "stuck"
    assert box.who() == "txn-1"


# the process supervisor


def supervisor_of(box: Box) -> int:
    return int(json.loads((box.dir / "run" / "supervisor.json").read_text())["pid"])


def gone(box: Box) -> bool:
    deadline = time.monotonic() + 10
    while box.members() or box.supervisors():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_sigterm_to_the_supervisor_leaves_no_orphans(box: Box) -> None:
    box.deploy("txn-1", engine={"who": "x", "orphan": 1})
    assert len(box.members()) == 2
    os.kill(supervisor_of(box), signal.SIGTERM)
    assert gone(box)
    assert box.call("status")["active"]["state"] == "inactive"


def test_what_a_killed_supervisor_left_ends_before_the_next_start(box: Box) -> None:
    box.deploy("txn-1", engine={"who": "x", "orphan": 1})
    before = set(box.members())
    os.kill(supervisor_of(box), signal.SIGKILL)
    time.sleep(0.1)
    assert box.call("status")["active"]["state"] == "failed"
    box.call("start")
    assert not before & set(box.members())
    assert box.call("restart")["active"]["restarts"] == 0
    os.kill(supervisor_of(box), signal.SIGKILL)
    time.sleep(0.1)
    box.call("stop")
    assert gone(box)


def test_a_crashed_engine_is_restarted(box: Box) -> None:
    box.deploy("txn-1")
    os.kill(box.probe()["active"]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while box.who() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert box.probe()["active"]["restarts"] == 1
    assert any("ended with status -9" in line for line in box.call("logs")["lines"])


def test_a_pid_that_belongs_to_another_is_left_alone(box: Box) -> None:
    box.deploy("txn-1")
    os.kill(supervisor_of(box), signal.SIGTERM)
    assert gone(box)
    known = json.loads((box.dir / "run" / "supervisor.json").read_text())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        (box.dir / "run" / "supervisor.json").write_text(json.dumps({**known, "pid": other.pid}))
        box.call("stop")
        assert other.poll() is None
        box.call("start")
        assert box.probe()["active"]["state"] == "active"
        other.kill()


def test_the_log_is_capped_and_kept_readable(box: Box) -> None:
    box.deploy("txn-1", engine={"who": "x", "chatter": 12_000})
    run: Path = box.dir / "run"
    assert (run / "log").stat().st_size <= 8 << 20
    assert (run / "log.1").stat().st_size <= 8 << 20
    assert len(box.call("logs", lines=5000)["lines"]) > 900


def test_what_a_killed_writer_left_is_swept(box: Box) -> None:
    """Killed between the temporary file and its rename, wherever a transaction writes."""
    box.deploy("txn-1")
    box.call("apply", plan=box.plan("txn-2"))
    kill_at(box, "txn-2", "gate begin")
    home = box.dir / "generations" / "2"
    (home / "evidence" / "txn-2").mkdir(parents=True)
    left = [box.dir, box.dir / "generations", home, home / "evidence" / "txn-2", box.dir / "run"]
    for directory in left:
        (directory / ".verdict.json.0123abcd.tmp").write_text("{")
    box.call("recover", reason="the applier was killed")
    assert list(box.dir.rglob(".*.tmp")) == []


def test_stopped_after_its_supervisor_was_killed_it_is_inactive(box: Box) -> None:
    box.deploy("txn-1")
    os.kill(json.loads((box.dir / "run" / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    assert box.call("stop")["active"]["state"] == "inactive"
    assert box.members() == [] and box.who() is None
    assert box.call("start")["active"]["state"] == "active"


def test_recover_ends_a_supervisor_that_was_only_about_to_be_one(box: Box) -> None:
    """Given an applier that was killed while it started one, slow to begin: it may not take the right one's place."""
    box.deploy("txn-1")
    assert len(box.marked("DDTREE_SUPERVISES")) == 1
    box.call("apply", plan=box.plan("txn-2"))
    kill_at(box, "txn-2", "stop done")
    slow = subprocess.Popen(["sleep", "60"], env={"DDTREE_SUPERVISES": box.marker})
    try:
        deadline = time.monotonic() + 5
        while (box.probe()["lock"] or {}).get("alive"):
            assert time.monotonic() < deadline
        box.call("recover", reason="the applier was killed")
        assert slow.wait(10) == -signal.SIGKILL
        stands_on(box, 1, "txn-1")
    finally:
        slow.kill()
        slow.wait()
