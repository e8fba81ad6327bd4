"""``ddtree doctor`` and ``ddtree hosts`` on real hosts: as root, by sudo, without rights; healthy and sick ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .harness import TestHost
from .test_main_job import PORT, SERVICE, Workspace, with_short_gate

#: What a test host has beside a real one: no time service of its own, and little memory for hosts of GPUs.
OF_THE_HARNESS = {"clock-sync"}


@pytest.fixture
def pair(ct200: TestHost, b300: TestHost, tmp_path: Path) -> Iterator[Workspace]:
    """A workspace of both hosts: root on ct200, a user with sudo on b300."""
    for host in (ct200, b300):
        host.reset()
    yield with_short_gate(tmp_path, {ct200: "root", b300: "deploy"})


def doctor(workspace: Workspace, host: str, *words: str, code: int = 0) -> dict[str, Any]:
    (answer,) = workspace.json("doctor", "--host", host, "--patience", "20", *words, code=code)["hosts"]
    found: dict[str, Any] = answer["doctor"]
    return found


def findings(report: dict[str, Any]) -> set[str]:
    return {found["id"] for found in report["findings"]} - OF_THE_HARNESS


def edit(workspace: Workspace, host: str, **keys: Any) -> None:
    file = workspace.path / "inventories" / f"{host}.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **keys}))


def test_healthy_hosts_as_root_and_by_sudo(pair: Workspace, ct200: TestHost, b300: TestHost) -> None:
    """Nothing is found, nothing is written, and nothing stays."""
    before = ct200.sh("find / -xdev -newer /etc/hostname -type f | sort; ls /tmp")
    for host in ("ct200", "b300"):
        report = doctor(pair, host)
        assert findings(report) == set()
        assert {"rights-root", "os-systemd", "os-python", "os-venv", "disk-space", "port-taken"} <= set(
            report["passed"]
        )
        assert "clock-offset" in report["passed"]
    after = ct200.sh("find / -xdev -newer /etc/hostname -type f | sort; ls /tmp")
    new = set(after.splitlines()) - set(before.splitlines())
    assert not {path for path in new if not path.startswith("/var/log/")}
    assert "collect" not in ct200.sh("ps ax")


def test_a_user_without_rights_is_told_what_is_missing(pair: Workspace) -> None:
    edit(pair, "ct200", user="plain", sudo=False)
    report = doctor(pair, "ct200", code=1)
    assert findings(report) == {"rights-root"}
    assert "service-log" in report["not_made"]
    assert "os-python" in report["passed"]


def test_sick_hosts(pair: Workspace, ct200: TestHost) -> None:
    """Somebody else on the port, a masked unit, a full disk, a clock that is off: each by its name, all at once."""
    ct200.sh(f"systemd-run --unit=squatter python3 -m http.server --bind 127.0.0.1 {PORT}")
    ct200.sh(f"ln -s /dev/null /etc/systemd/system/{SERVICE}.service && systemctl daemon-reload")
    ct200.sh("mkdir -p /opt/ddtree && mount -t tmpfs -o size=64M,noexec tmpfs /opt/ddtree")
    ct200.sh("until ss -ltn | grep -q 30000; do sleep 0.2; done")
    report = doctor(pair, "ct200", code=1)
    assert findings(report) == {"port-taken", "service-masked", "disk-space", "disk-mount"}
    (taken,) = [found for found in report["findings"] if found["id"] == "port-taken"]
    assert taken["seen"].startswith("python3 (pid ") and f"listens on {PORT}" in taken["seen"]


def test_a_known_death_in_the_journal_is_named(pair: Workspace, ct200: TestHost) -> None:
    line = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    unit = f"[Service]\nType=exec\nExecStart=/bin/sh -c 'echo \"{line}\" >&2; exit 1'\n"
    ct200.put(f"/etc/systemd/system/{SERVICE}.service", unit.encode())
    ct200.sh(f"systemctl daemon-reload; systemctl start {SERVICE} || true; sleep 1")
    report = doctor(pair, "ct200", code=1)
    assert findings(report) == {"service-log"}
    assert "not built for this GPU" in report["findings"][0]["seen"]


@pytest.mark.alone
def test_tools_that_hang_and_flood_there(pair: Workspace, ct200: TestHost) -> None:
    """FAKE tools on a host meant for a GPU engine: it answers within the limit, and passes nothing by silence."""
    edit(pair, "ct200", gpus={"count": 8, "name": "x", "arch": "sm_120", "memory_gib": 96, "interconnect": "pcie"})
    file = pair.path / "inventories" / "ct200.yaml"
    inventory = yaml.safe_load(file.read_text())
    inventory["services"][SERVICE] |= {"base": "kimi-k26", "gpus": list(range(8))}
    file.write_text(yaml.safe_dump(inventory))
    for script in ("sleep 300", "yes | head -c 100000000", "head -c 9999 /dev/urandom"):
        ct200.put("/usr/local/bin/nvidia-smi", f"#!/bin/sh\n{script}\n".encode(), 0o755)
        ct200.put("/usr/local/bin/nv-fabricmanager", b"#!/bin/sh\nsleep 300\n", 0o755)
        (host,) = pair.json("doctor", "--host", "ct200", code=1)["hosts"]
        assert host["collector"]["seconds"] < 3
        ids = findings(host["doctor"])
        assert "driver-missing" in ids and "model-missing" in ids
        assert not {"gpu-count", "gpu-ecc"} & ids
        assert "sleep 300" not in ct200.sh("ps ax")
        refused = pair.json("doctor", "--host", "ct200", "--active", "--only", "all-reduce", code=1)["hosts"][0][
            "doctor"
        ]
        assert "not tried" in refused["findings"][0]["seen"]


def test_hosts_at_a_glance_one_of_them_away(pair: Workspace, b300: TestHost, tmp_path: Path) -> None:
    gauges = tmp_path / "ddtree.prom"
    rows = pair.json("hosts", "--prometheus", str(gauges))["hosts"]
    assert {row["host"]: row["doctor"] for row in rows}.keys() == {"ct200", "b300"}
    assert all(row["gpus busy"] in ("none", "?") and row["state"] == "inactive" for row in rows)
    b300.down()
    try:
        rows = pair.json("hosts", "--prometheus", str(gauges), code=6)["hosts"]
    finally:
        b300.up()
    assert {row["host"]: row["state"] for row in rows} == {"ct200": "inactive", "b300": "unreachable"}
    text = gauges.read_text()
    assert f'ddtree_host_reachable{{host="b300",service="{SERVICE}"}} 0' in text
    assert f'ddtree_host_reachable{{host="ct200",service="{SERVICE}"}} 1' in text


@pytest.mark.timeout(1500)
def test_a_deployed_service_is_healthy_and_its_release_can_be_tried(pair: Workspace, ct200: TestHost) -> None:
    """After a deploy: nothing found, imports proven in the release; with a stale verdict on disk, that is found."""
    pair.ddtree("deploy", "--host", "ct200", "--yes", timeout=1200)
    report = doctor(pair, "ct200", "--active")
    assert findings(report) == set()
    assert {"imports", "verdict-stale", "accept-length", "server-arguments", "service-silent"} <= set(report["passed"])
    assert ct200.sh("ls /tmp").find("ddtree-active") == -1
    (row,) = [row for row in pair.json("hosts", code=0)["hosts"] if row["host"] == "ct200"]
    assert row["budget/topk"] == "8/4" and row["verdict"].startswith("EXACT") and row["doctor"] in ("ok", "1 not made")
    ct200.sh(f"touch -d '40 days ago' /opt/ddtree/services/{SERVICE}/generations/1/verdict.json")
    report = doctor(pair, "ct200")
    assert findings(report) == {"verdict-stale"} and "40 days ago" in json.dumps(report)
