"""A release over ssh onto real hosts."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import Failed, Unreachable
from ddtree_ops.release import Cache, Release, build
from ddtree_ops.remote import Agent, Transport, connect
from ddtree_ops.remote.openssh import Carrier, carrier
from ddtree_ops.remote.ship import remaining, ship, stream

from ..unit.release.test_build import REFERENCE, make
from ..unit.release.wheelwright import lock_of
from .harness import TestHost
from .test_ssh import entry

ROOT = "/opt/ddtree"


class Line:
    """A connection to a test host that can be made again, as a deploy's session can."""

    def __init__(self, host: TestHost, user: str) -> None:
        self.entry = entry(host, user=user, sudo=user != "root")
        self.reconnect()

    def reconnect(self) -> None:
        self.transport = connect(self.entry)
        self.agent = Agent(self.transport, ROOT, "svc", "systemd")

    def beside(self) -> Transport:
        return connect(self.entry)

    def carrier(self) -> Carrier | None:
        return carrier(self.entry)


@pytest.fixture(params=["root", "deploy"])
def line(request: pytest.FixtureRequest, testhost: TestHost) -> Iterator[Line]:
    testhost.reset()
    made = Line(testhost, request.param)
    yield made
    made.transport.close()
    testhost.shape(None)
    testhost.uncut()


def with_noise(release: Release, megabytes: int) -> Release:
    """The release with files of random bytes, of 1 MB each, added."""
    files: list[dict[str, Any]] = list(release.manifest["files"])
    for n in range(megabytes):
        sha256, size = release.cache.add_blob([os.urandom(1 << 20)])
        files.append({"path": f"share/noise/{n}", "sha256": sha256, "size": size, "mode": 0o644})
    return Release(release.id, {**release.manifest, "files": files}, release.cache)


def on_the_wire(release: Release) -> int:
    """What an uninterrupted upload of all of it sends."""
    pieces = remaining({file["sha256"]: file["size"] for file in release.manifest["files"]}, [], {})
    return sum(len(chunk) for chunk in stream(pieces, release.blob, lambda size: None))


def whole(host: TestHost, release: Release) -> bool:
    """Every file of the release is on the host, byte for byte, and belongs to root."""
    home = f"{ROOT}/releases/{release.id}"
    sums = "".join(f"{file['sha256']}  {home}/{file['path']}\n" for file in release.manifest["files"])
    done = host.run(["sha256sum", "--quiet", "-c", "-"], stdin=sums.encode())
    host.sh(f"cat {home}/installed.json")
    return done.returncode == 0 and host.sh(f"find {ROOT}/releases {ROOT}/store ! -user root") == ""


def test_once_and_again(line: Line, testhost: TestHost, tmp_path: Path) -> None:
    release = make(tmp_path)
    first = ship(line, release)
    assert first.files == len(release.manifest["files"])
    assert first.bytes_sent > 0
    python = f"{ROOT}/releases/{release.id}/venv/bin/python"
    assert testhost.sh(f"{python} -I -c 'import torch; print(torch.value)'") == "7\n"
    assert whole(testhost, release)
    assert testhost.sh("find /var/tmp/ddtree-staging-* -type f") == ""
    assert ship(line, release).bytes_sent == 0


def test_a_second_release_sends_only_what_is_new(line: Line, tmp_path: Path) -> None:
    first = ship(line, with_noise(make(tmp_path), 5))
    assert first.bytes_sent > 5 << 20
    (tmp_path / "package/engine/walk.py").write_bytes(b"STEPS = 5\n")
    cache = Cache(tmp_path / "cache")
    changed = build(REFERENCE, cache=cache, package=tmp_path / "package", lock=lock_of(*cache.wheels.iterdir()))
    second = ship(line, changed)
    assert 0 < second.bytes_sent < 100_000


def hurt(host: TestHost, how: str) -> None:
    """One accident of the link."""
    if how == "broken":
        host.break_sessions("deploy")
        return
    host.cut()
    time.sleep(3 if how == "short" else 12)
    host.uncut()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", ["deploy"], indirect=True)
def test_ten_cuts_on_a_slow_link_cost_less_than_a_tenth(line: Line, testhost: TestHost, tmp_path: Path) -> None:
    """1 MB/s; ten random moments; the cable out for 3 s or 12 s, or the connection broken."""
    dice = random.Random(20261129)
    release = with_noise(make(tmp_path), 30)
    plain = on_the_wire(release)
    moments = sorted(dice.uniform(0.02, 0.98) for _ in range(10))
    accidents = [dice.choice(["short", "long", "broken"]) for _ in moments]
    done_now, stop = [0], threading.Event()
    told: list[str] = []

    def trouble() -> None:
        for moment, how in zip(moments, accidents, strict=True):
            while done_now[0] < moment * (30 << 20):
                if stop.wait(0.02):
                    return
            hurt(testhost, how)

    testhost.shape(1_000_000)
    before, began = testhost.bytes_to, time.monotonic()
    beside = threading.Thread(target=trouble)
    beside.start()
    try:
        report = ship(line, release, lambda done, total: done_now.__setitem__(0, done), told.append)
    finally:
        stop.set()
        beside.join()
    wire = testhost.bytes_to - before
    print(
        f"{accidents}: {report.cuts} connections lost, {time.monotonic() - began:.0f} s; of {plain} bytes "
        f"{report.bytes_sent / plain:.1%} sent, {wire / plain:.1%} on the wire with headers"
    )
    assert report.cuts >= accidents.count("long") + accidents.count("broken") - 1
    assert report.bytes_sent < 1.10 * plain
    assert wire < 1.10 * 1.05 * plain  # TCP, IP and Ethernet headers are 4.6 % of a full packet
    assert whole(testhost, release)


@pytest.mark.parametrize("line", ["deploy"], indirect=True)
def test_a_host_that_stays_away_keeps_what_it_got(line: Line, testhost: TestHost, tmp_path: Path) -> None:
    release = with_noise(make(tmp_path), 60)
    cuts: list[int] = []

    def cut(done: int, total: int) -> None:
        if done > total // 2 and not cuts:
            cuts.append(done)
            testhost.cut()

    with pytest.raises(Unreachable) as caught:
        ship(line, release, cut, waits=(1,))
    assert "goes on from there" in caught.value.hint
    testhost.uncut()
    line.reconnect()
    report = ship(line, release)
    assert report.bytes_sent < 45 << 20
    assert whole(testhost, release)


@pytest.mark.parametrize("line", ["deploy"], indirect=True)
def test_power_loss_in_the_middle_of_an_upload(line: Line, testhost: TestHost, tmp_path: Path) -> None:
    """What the disk lost or tore is found by its hash and sent again."""
    release = with_noise(make(tmp_path), 60)
    cuts: list[int] = []

    def cut(done: int, total: int) -> None:
        if done > total // 2 and not cuts:
            cuts.append(done)
            testhost.powerloss()

    with pytest.raises(Unreachable):
        ship(line, release, cut, waits=(1,))
    testhost.up()
    line.reconnect()
    ship(line, release)
    assert whole(testhost, release)


@pytest.mark.parametrize("line", ["deploy"], indirect=True)
def test_a_staging_directory_of_somebody_else_is_refused(line: Line, testhost: TestHost, tmp_path: Path) -> None:
    release = make(tmp_path)
    testhost.sh("mkdir -m 777 /var/tmp/ddtree-staging-deploy; chown plain /var/tmp/ddtree-staging-deploy")
    with pytest.raises(Failed, match="belongs to uid"):
        ship(line, release)
    testhost.sh("rmdir /var/tmp/ddtree-staging-deploy; ln -s /etc /var/tmp/ddtree-staging-deploy")
    with pytest.raises(Failed, match="not a directory of its own"):
        ship(line, release)
    assert testhost.run(["sh", "-c", "ls /etc | grep -E '^[0-9a-f]{64}$'"]).returncode == 1
    assert testhost.run(["ls", ROOT]).returncode == 2  # nothing was begun


@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", ["deploy"], indirect=True)
def test_the_reference_release_runs_on_a_host(line: Line, testhost: TestHost) -> None:
    """The real thing: torch and the engine, shipped, installed, imported."""
    release = build(REFERENCE)
    assert build(REFERENCE).id == release.id
    start = time.monotonic()
    report = ship(line, release)
    took = time.monotonic() - start
    print(f"{report} in {took:.1f} s")
    # How much less depends on which is faster here, the link or a core that compresses (tests/unit/remote/test_pack).
    assert 0 < report.bytes_sent < report.bytes_total
    python = f"{ROOT}/releases/{release.id}/venv/bin/python"
    said = testhost.sh(f"{python} -I -c 'import torch, ddtree_ops.engine; print(torch.ones(2) @ torch.ones(2))'")
    assert said == "tensor(2.)\n"
    assert testhost.sh(f"{python} -I -m ddtree_ops.engine --help").startswith("usage:")
    assert ship(line, release).bytes_sent == 0
