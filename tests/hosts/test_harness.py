"""The harness itself: what the other tests here take for granted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .harness import STATE, Lab, TestHost, laboratory
from .machine import alive


def test_systemd_is_pid_1_and_running(ct200: TestHost, b300: TestHost) -> None:
    for host in (ct200, b300):
        assert host.sh("cat /proc/1/comm").strip() == "systemd"
        assert host.sh("systemctl is-system-running").strip() == "running"
        assert host.sh("hostname").strip() == host.name


@pytest.mark.parametrize(("user", "sudo"), [("root", 0), ("deploy", 0), ("asks", 1), ("plain", 1)])
def test_ssh_and_sudo_of_each_user(testhost: TestHost, user: str, sudo: int) -> None:
    assert testhost.ssh("whoami", user=user).stdout.decode().strip() == user
    assert testhost.ssh("sudo -n true", user=user).returncode == sudo


def test_run_and_put_as_root_and_user(testhost: TestHost) -> None:
    testhost.put("/tmp/dir with space/file", b"\x00\xff\n", mode=0o600)
    assert testhost.run(["cat", "/tmp/dir with space/file"]).stdout == b"\x00\xff\n"
    assert testhost.run(["cat", "/tmp/dir with space/file"], user="plain").returncode == 1
    assert testhost.run(["cat"], stdin=b"given").stdout == b"given"


def test_power_loss_keeps_synced_files_only(testhost: TestHost) -> None:
    testhost.sh("mkdir -p /srv; echo synced >/srv/synced; sync -f /srv; echo unsynced >/srv/unsynced")
    testhost.powerloss()
    assert not testhost.leader
    assert testhost.ssh("true").returncode == 255
    testhost.up()
    assert testhost.sh("cat /srv/synced").strip() == "synced"
    assert testhost.run(["test", "-s", "/srv/unsynced"]).returncode == 1


def test_down_and_up_keep_the_disk_and_reset_does_not(testhost: TestHost) -> None:
    testhost.sh("touch /srv/here")
    key = testhost.hostkey
    testhost.down()
    testhost.up()
    assert testhost.run(["test", "-e", "/srv/here"]).returncode == 0
    testhost.reset()
    assert testhost.run(["test", "-e", "/srv/here"]).returncode == 1
    assert testhost.hostkey == key
    assert testhost.ssh("true").returncode == 0


def test_a_cut_link_is_silent_and_comes_back(testhost: TestHost) -> None:
    testhost.cut()
    try:
        assert testhost.ssh("true").returncode == 255
        assert testhost.sh("echo still here").strip() == "still here"
    finally:
        testhost.uncut()
    assert testhost.ssh("true").returncode == 0


def test_a_host_that_is_down_never_leads_out_of_this_machine(lab: Lab) -> None:
    route = subprocess.run(["ip", "route", "get", f"{lab.net}.200.2"], capture_output=True, text=True, check=False)
    assert route.returncode != 0
    assert "unreachable" in route.stderr.lower() or "no route" in route.stderr.lower()


def test_fake_gpus_say_so(ct200: TestHost) -> None:
    names = ct200.sh("nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits").splitlines()
    assert names == ["NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887"] * 8
    assert "FAKE" in ct200.sh("nvidia-smi")


KILLED_RUN = """
import os
from tests.hosts.harness import SLOTS, laboratory
# from the last slot on: another worker of this run may make or end its own meanwhile, and takes the first free one
with laboratory(SLOTS[::-1]) as lab:
    host = lab.host("left")
    print(lab.slot, host.leader, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_leftovers_of_a_killed_run_are_cleared(lab: Lab) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED_RUN], cwd=root, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    slot, leader = map(int, killed.stdout.split())
    assert slot != lab.slot
    assert alive(leader)
    with laboratory([slot]) as second:
        assert second.slot == slot
        assert not alive(leader)
        assert not (STATE / f"slot{slot}" / "h" / "left").exists()
    assert not (STATE / f"slot{slot}").exists()
    assert not list(Path("/run/netns").glob(f"ddt{slot}-*"))
