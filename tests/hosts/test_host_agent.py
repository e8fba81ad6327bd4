"""Given a host with systemd, whatever happens a deploy ends on the new, proven service or on the one before."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.host.box import ENGINE, SECRET, Box, Refused

from .harness import TestHost

ASK = """
import json, sys, urllib.request
try:
    print(json.load(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/server_info", timeout=2))["who"])
except OSError:
    pass
"""
UNIT = """\
[Unit]
Description=test engine
Wants=ddtree-recover@{service}.service
After=network.target ddtree-recover@{service}.service

[Service]
Type=exec
User=ddtree
EnvironmentFile=/opt/ddtree/services/{service}/generations/{n}/env
ExecStart=/usr/bin/python3 -I /opt/engine.py {words}
Restart=on-failure
RestartSec=1
TimeoutStopSec=20

[Install]
WantedBy=multi-user.target
"""
HAND_MADE = """\
[Service]
ExecStart=/usr/bin/python3 -I /opt/engine.py port={port} who=nobody
Restart=always
# made by hand, as it is \\o/
"""
DROP_IN = """\
[Service]
ExecStart=
ExecStart=/usr/bin/python3 -I /opt/engine.py port={port} who=by-hand
"""


class Machine(Box):
    """The service on a test host."""

    supervisor = "systemd"
    python = "/usr/bin/python3"
    port = 31000

    def __init__(self, host: TestHost, service: str) -> None:
        super().__init__(Path("/opt/ddtree"), service)
        self.host, self.port = host, Machine.port
        self.unit = f"{self.unit_dir}/{service}.service"

    def execute(self, argv: list[str], stdin: bytes = b"", timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        return self.host.run(argv, stdin=stdin, timeout=timeout)

    def files(self, n: int, **engine: Any) -> dict[str, str]:
        words = " ".join(json.dumps(f"{key}={value}") for key, value in {"port": self.port, **engine}.items())
        unit = UNIT.format(service=self.service, n=n, words=words)
        return {"unit": unit, "env": f"ENGINE_API_KEY={SECRET}\n"}

    def journal(self) -> str:
        return self.execute(["cat", str(self.dir / "journal.jsonl")]).stdout.decode()

    def who(self, patience: float = 3) -> str | None:
        deadline = time.monotonic() + patience
        while True:
            said = self.execute([self.python, "-c", ASK, str(self.port)]).stdout.decode().strip()
            if said or time.monotonic() > deadline:
                return said or None
            time.sleep(0.1)

    def facts(self) -> str:
        """All of the host that belongs to this service outside its directory, as text."""
        script = f"""
        cd {self.unit_dir}; find . -name '*{self.service}.service*' | sort | while read -r f; do
            if [ -L "$f" ]; then echo "$f -> $(readlink "$f")"
            elif [ -f "$f" ]; then stat -c '%n %a %u %g' "$f"; sha256sum "$f"; fi
        done
        systemctl is-enabled {self.service} 2>&1 || true
        """
        return self.host.sh(script)

    def main_pid(self) -> str:
        return self.host.sh(f"systemctl show -P MainPID {self.service}").strip()

    def settled(self, n: int | None, who: str | None) -> None:
        assert self.who(3 if who else 0) == who
        seen = self.probe()
        assert (seen["state"], seen["drift"]) == ({"confirmed": n, "pending": None}, [])
        assert seen["lock"] is None or not seen["lock"]["alive"]
        processes = self.host.sh("ps axo args").splitlines()
        assert len([line for line in processes if f"port={self.port}" in line]) == (0 if who is None else 1)
        assert not [line for line in processes if "ddtree-host" in line]
        stray = self.host.sh(f"ls -A {self.unit_dir} {self.dir}").splitlines()
        assert not [name for name in stray if "tmp" in name or "reserve" in name]
        units = self.host.sh("systemctl list-units --all --plain --no-legend 'ddtree-apply-*'")
        assert units == ""
        assert self.host.sh("systemctl --failed --plain --no-legend").strip() == ""

    def deploy(self, txn: str, *, passed: bool = True, **more: Any) -> dict[str, Any]:
        end = super().deploy(txn, passed=passed, **more)
        deadline = time.monotonic() + 10  # the transient unit ends just after the journal
        while self.host.sh("systemctl list-units --all --plain --no-legend 'ddtree-apply-*'"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return end


@pytest.fixture
def machine(testhost: TestHost, request: pytest.FixtureRequest) -> Iterator[Machine]:
    Machine.port += 1
    made = Machine(testhost, f"web-{Machine.port}")
    testhost.put("/opt/engine.py", ENGINE.read_bytes())
    made.bootstrap()
    yield made
    testhost.up()
    testhost.sh(
        f"systemctl disable --now -q {made.service} 2>/dev/null || true; systemctl reset-failed; "
        f"rm -rf {made.unit} {made.unit}.d {made.unit_dir}/*/ddtree-recover@{made.service}.service {made.dir}; "
        "systemctl daemon-reload"
    )


def test_deploys_confirm_and_replace_each_other(machine: Machine) -> None:
    end = machine.deploy("txn-1")
    assert end["event"] == "confirmed", end
    machine.settled(1, "txn-1")
    assert machine.host.sh(f"systemctl is-enabled {machine.service}").strip() == "enabled"
    assert machine.host.sh(f"stat -c '%a %U %G' {machine.dir}/generations/1/env").strip() == "640 root ddtree"
    end = machine.deploy("txn-2", engine={"who": "txn-2", "info": '{"tp_size":2}'}, wanted={"tp_size": 2})
    assert end["event"] == "confirmed", end
    assert 0 < end["downtime_s"] < 10
    machine.settled(2, "txn-2")
    seen = machine.probe()
    assert seen["active"]["state"] == "active"
    assert abs(seen["active"]["since_unix"] - time.time()) < 60
    assert seen["unit"]["sha256"] == seen["generation"]["files"]["unit"]
    assert seen["system"]["pid1"] == "systemd"


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"sick": 1}, "/health answered 503"),
        ({"info": '{"tp_size":4}'}, "tp_size: wanted 2, got 4"),
        ({"say": "FATAL-error", "sick": 1}, "fatal line in its log: FATAL-error"),
        ({"exit": 3}, "crash loop: 3 restarts"),
        ({"exit": 0}, "the service ended (inactive"),
        ({"info": '{"tp_size":2}', "orphan": 1}, "the verdict is FAIL"),
    ],
)
def test_a_bad_service_gives_way_to_the_one_before(machine: Machine, engine: dict[str, Any], reason: str) -> None:
    machine.deploy("txn-1")
    before = machine.facts()
    health = {
        "port": machine.port,
        "timeout_s": 3 if engine == {"sick": 1} else 20,
        "expect": {"tp_size": 2},
        "fatal": ["FATAL"],
    }
    end = machine.deploy("txn-2", engine=engine, health=health, passed=False)
    assert (end["event"], end["generation"]) == ("recovered", 1)
    assert reason in end["reason"]
    machine.settled(1, "txn-1")
    assert machine.facts() == before
    assert SECRET not in machine.host.sh(f"cat {machine.dir}/journal.jsonl {machine.dir}/generations/2/evidence/*/*")


def test_a_first_deploy_that_fails_leaves_nothing(machine: Machine) -> None:
    before = machine.facts()
    assert machine.deploy("txn-1", passed=False)["event"] == "recovered"
    machine.settled(None, None)
    assert machine.facts() == before


def test_a_unit_that_does_not_verify_stops_nothing(machine: Machine) -> None:
    machine.deploy("txn-1")
    pid = machine.main_pid()
    plan = machine.plan("txn-2")
    plan["generation"]["files"]["unit"] = plan["generation"]["files"]["unit"].replace(
        "/usr/bin/python3", "/usr/bin/pithon3"
    )
    machine.call("apply", plan=plan)
    end = machine.end("txn-2")
    assert end["event"] == "unchanged"
    assert "systemd-analyze verify refused" in end["reason"]
    time.sleep(0.5)
    machine.settled(1, "txn-1")
    assert machine.main_pid() == pid
    assert machine.deploy("txn-3")["generation"] == 3


def hand_made(machine: Machine) -> str:
    machine.host.put(machine.unit, HAND_MADE.format(port=machine.port).encode(), mode=0o640)
    machine.host.put(f"{machine.unit}.d/10-args.conf", DROP_IN.format(port=machine.port).encode())
    machine.host.sh(
        f"cd {machine.unit_dir}; mkdir -p basic.target.wants; ln -s ../{machine.service}.service basic.target.wants/; "
        f"systemctl daemon-reload; systemctl start {machine.service}"
    )
    assert machine.who() == "by-hand"
    return machine.facts()


def test_an_adopted_unit_comes_back_byte_for_byte(machine: Machine) -> None:
    before = hand_made(machine)
    with pytest.raises(Refused, match="not ours"):
        machine.call("apply", plan=machine.plan("txn-0"))
    end = machine.deploy("txn-1", adopt=True, passed=False)
    assert (end["event"], end["generation"]) == ("recovered", 0)
    assert machine.who() == "by-hand"
    strip = f"ddtree-recover@{machine.service}.service"
    now = "\n".join(line for line in machine.facts().splitlines() if strip not in line)
    assert now.strip() == before.strip()
    end = machine.deploy("txn-2")
    assert (end["event"], end["generation"]) == ("confirmed", 2)
    machine.settled(2, "txn-2")
    assert machine.host.run(["test", "-e", f"{machine.unit}.d"]).returncode == 1
    end = machine.deploy("txn-3", action="rollback", generation=None, target=0)
    assert (end["event"], end["generation"]) == ("confirmed", 0)
    machine.settled(0, "by-hand")
    assert "\n".join(line for line in machine.facts().splitlines() if strip not in line).strip() == before.strip()


def test_drift_of_each_kind_is_refused_and_overwritten(machine: Machine) -> None:
    machine.deploy("txn-1")
    edits = {
        "the unit was edited": f"echo '# x' >>{machine.unit}",
        "drop-in 50-x.conf was added": f"mkdir -p {machine.unit}.d; echo '[Service]' >{machine.unit}.d/50-x.conf",
        "its links are": f"systemctl disable -q {machine.service}",
        "the unit is masked": f"rm {machine.unit}; ln -s /dev/null {machine.unit}",
        "the unit is gone": f"rm {machine.unit}",
    }
    for number, (said, edit) in enumerate(edits.items()):
        machine.host.sh(f"{edit}; systemctl daemon-reload")
        assert any(said in line for line in machine.probe()["drift"]), said
        with pytest.raises(Refused, match=said):
            machine.call("apply", plan=machine.plan(f"txn-r{number}"))
        txn = f"txn-o{number}"
        assert machine.deploy(txn, overwrite=True, passed=bool(number % 2))["event"] in ("confirmed", "recovered")
        machine.settled(machine.probe()["state"]["confirmed"], txn if number % 2 else machine.who())


@pytest.mark.parametrize(
    "moment", ["accept done", "stop begin", "switch begin", "switch done", "start done", "gate begin"]
)
def test_power_lost_before_confirm_boots_the_old_one(machine: Machine, moment: str) -> None:
    machine.deploy("txn-1")
    before = machine.facts()
    machine.call("apply", plan=machine.plan("txn-2"))
    step, event = moment.split()
    machine.wait("txn-2", step, event)
    machine.host.powerloss()
    machine.host.up()
    assert machine.end("txn-2")["event"] in ("recovered", "unchanged")
    machine.settled(1, "txn-1")
    assert machine.facts() == before
    assert machine.deploy("txn-3")["event"] == "confirmed"


def test_power_lost_after_confirm_boots_the_new_one(machine: Machine) -> None:
    machine.deploy("txn-1")
    machine.deploy("txn-2")
    machine.host.powerloss()
    machine.host.up()
    machine.settled(2, "txn-2")
    assert machine.end("txn-2")["event"] == "confirmed"


def test_power_lost_in_a_first_deploy_boots_without_it(machine: Machine) -> None:
    before = machine.facts()
    machine.call("apply", plan=machine.plan("txn-1"))
    machine.wait("txn-1", "gate", "begin")
    machine.host.powerloss()
    machine.host.up()
    assert machine.end("txn-1")["event"] == "recovered"
    machine.settled(None, None)
    assert machine.facts() == before


def test_power_lost_while_adopting_boots_the_hand_made_one(machine: Machine) -> None:
    hand_made(machine)
    machine.call("apply", plan=machine.plan("txn-1", adopt=True))
    machine.wait("txn-1", "gate", "begin")
    machine.host.powerloss()
    machine.host.up()
    assert machine.end("txn-1")["event"] == "recovered"
    machine.settled(0, "by-hand")


def test_a_clean_reboot_in_mid_deploy_boots_the_old_one(machine: Machine) -> None:
    machine.deploy("txn-1")
    machine.call("apply", plan=machine.plan("txn-2"))
    machine.wait("txn-2", "gate", "begin")
    began = time.monotonic()
    machine.host.down()
    assert time.monotonic() - began < 15
    machine.host.up()
    assert machine.end("txn-2")["event"] == "recovered"
    machine.settled(1, "txn-1")


@pytest.mark.parametrize("moment", ["generation done", "stop begin", "switch done", "gate begin"])
def test_a_killed_applier_is_followed_by_a_recovery(machine: Machine, moment: str) -> None:
    machine.deploy("txn-1")
    machine.call("apply", plan=machine.plan("txn-2"))
    step, event = moment.split()
    machine.wait("txn-2", step, event)
    machine.host.sh(f"systemctl kill --kill-whom=main -s KILL ddtree-apply-{machine.service}")
    assert machine.end("txn-2")["event"] in ("recovered", "unchanged")
    time.sleep(1)
    machine.settled(1, "txn-1")


def test_a_stopped_applier_recovers(machine: Machine) -> None:
    machine.deploy("txn-1")
    machine.call("apply", plan=machine.plan("txn-2"))
    machine.wait("txn-2", "gate", "begin")
    machine.host.sh(f"systemctl stop ddtree-apply-{machine.service}")
    assert machine.end("txn-2")["reason"] == "gate: told to stop: SIGTERM"
    machine.settled(1, "txn-1")


def test_a_full_disk_before_and_during_a_deploy(machine: Machine) -> None:
    machine.deploy("txn-1")
    plan = machine.plan("txn-2")
    full = "fallocate -l $(df --output=avail -B1 /opt | tail -1) /opt/fill.1 || true; sync; "
    full += "for bs in 1M 1k; do dd if=/dev/zero of=/opt/fill.$bs bs=$bs status=none 2>/dev/null || true; done; sync"
    machine.host.sh(full)
    with pytest.raises(Refused) as refused:
        machine.call("apply", plan=plan)
    assert refused.value.kind == "disk-full"
    machine.settled(1, "txn-1")
    machine.host.sh("rm /opt/fill.*")
    machine.call("apply", plan={**plan, "txn": "txn-3"})
    machine.wait("txn-3", "gate", "begin")
    machine.host.sh(full)
    machine.call("unlock", reason="the disk is full", wait_s=0)
    assert machine.end("txn-3")["event"] == "recovered"
    time.sleep(1)
    machine.host.sh("rm /opt/fill.*")
    machine.settled(1, "txn-1")


def test_collect_shows_what_runs_and_no_secret(machine: Machine) -> None:
    machine.deploy(
        "txn-1",
        engine={
            "who": "txn-1",
            "info": json.dumps({"tp_size": 2, "api_key": SECRET, "model_path": SECRET}).replace(" ", ""),
        },
    )
    reply = machine.call("collect")
    assert reply["server_info"] == {"tp_size": 2, "model_path": "<redacted>"}
    assert reply["env"].strip() == "ENGINE_API_KEY=<redacted>"
    assert len(reply["gpus"]) in (0, 8)
    assert SECRET not in json.dumps([reply, machine.probe(), machine.call("logs", lines=200)])
