"""A release over ssh onto real hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import DdtreeError, Failed, Unreachable
from ddtree_ops.release import Cache, Release, build
from ddtree_ops.remote import Agent, connect, ship

from ..unit.release.test_build import make
from ..unit.release.wheelwright import lock_of
from .harness import TestHost
from .test_ssh import entry

ROOT = "/opt/ddtree"


@pytest.fixture(params=["root", "deploy"])
def agent(request: pytest.FixtureRequest, testhost: TestHost) -> Iterator[Agent]:
    testhost.reset()
    with connect(entry(testhost, user=request.param, sudo=request.param == "deploy")) as transport:
        yield Agent(transport, ROOT, "svc", "systemd")


def with_noise(release: Release, megabytes: int) -> Release:
    """The release with files of random bytes, of 1 MB each, added."""
    files: list[dict[str, Any]] = list(release.manifest["files"])
    for n in range(megabytes):
        sha256, size = release.cache.add_blob([os.urandom(1 << 20)])
        files.append({"path": f"share/noise/{n}", "sha256": sha256, "size": size, "mode": 0o644})
    return Release(release.id, {**release.manifest, "files": files}, release.cache)


def test_once_and_again(agent: Agent, testhost: TestHost, tmp_path: Path) -> None:
    release = make(tmp_path)
    first = ship(agent, release)
    assert first.files == len(release.manifest["files"])
    assert first.bytes_sent > 0
    python = f"{ROOT}/releases/{release.id}/venv/bin/python"
    assert testhost.sh(f"{python} -I -c 'import torch; print(torch.value)'") == "7\n"
    assert testhost.sh(f"find {ROOT}/releases {ROOT}/store ! -user root") == ""
    assert testhost.sh("find /var/tmp/ddtree-staging-* -type f") == ""
    assert ship(agent, release).bytes_sent == 0


def test_a_second_release_sends_only_what_is_new(agent: Agent, tmp_path: Path) -> None:
    first = ship(agent, with_noise(make(tmp_path), 5))
    assert first.bytes_sent > 5 << 20
    (tmp_path / "package/engine/walk.py").write_bytes(b"STEPS = 5\n")
    cache = Cache(tmp_path / "cache")
    changed = build("reference", cache=cache, package=tmp_path / "package", lock=lock_of(*cache.wheels.iterdir()))
    second = ship(agent, changed)
    assert 0 < second.bytes_sent < 300_000


@pytest.mark.parametrize("agent", ["deploy"], indirect=True)
def test_a_cut_upload_goes_on_where_it_was(agent: Agent, testhost: TestHost, tmp_path: Path) -> None:
    release = with_noise(make(tmp_path), 60)

    def cut(done: int, total: int) -> None:
        if done > total // 2 and not cuts:
            cuts.append(done)
            testhost.cut()

    cuts: list[int] = []
    try:
        with pytest.raises(Unreachable, match="is lost"):
            ship(agent, release, cut)
    finally:
        testhost.uncut()
    assert cuts
    with connect(entry(testhost, user="deploy", sudo=True)) as transport:
        report = ship(Agent(transport, ROOT, "svc", "systemd"), release)
    assert report.bytes_sent < 45 << 20
    testhost.sh(f"cat {ROOT}/releases/{release.id}/installed.json")
    assert testhost.sh(f"ls {ROOT}/releases/{release.id}/share/noise | wc -l").strip() == "60"


@pytest.mark.parametrize("agent", ["deploy"], indirect=True)
def test_a_staging_directory_of_somebody_else_is_refused(agent: Agent, testhost: TestHost, tmp_path: Path) -> None:
    testhost.sh("mkdir -m 777 /var/tmp/ddtree-staging-deploy; chown plain /var/tmp/ddtree-staging-deploy")
    with pytest.raises(Failed, match="upload failed") as caught:
        ship(agent, make(tmp_path))
    assert "belongs to uid" in caught.value.hint
    testhost.sh("rmdir /var/tmp/ddtree-staging-deploy; ln -s /etc /var/tmp/ddtree-staging-deploy")
    with pytest.raises(DdtreeError):
        ship(agent, make(tmp_path))
    assert testhost.run(["sh", "-c", "ls /etc | grep -E '^[0-9a-f]{64}$'"]).returncode == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", ["deploy"], indirect=True)
def test_the_reference_release_runs_on_a_host(agent: Agent, testhost: TestHost) -> None:
    """The real thing: torch and the engine, shipped, installed, imported."""
    release = build("reference")
    assert build("reference").id == release.id
    start = time.monotonic()
    report = ship(agent, release)
    took = time.monotonic() - start
    print(f"{report} in {took:.1f} s")
    assert report.bytes_sent < report.bytes_total / 2
    python = f"{ROOT}/releases/{release.id}/venv/bin/python"
    said = testhost.sh(f"{python} -I -c 'import torch, ddtree_ops.engine; print(torch.ones(2) @ torch.ones(2))'")
    assert said == "tensor(2.)\n"
    assert testhost.sh(f"{python} -I -m ddtree_ops.engine --help").startswith("usage:")
    start = time.monotonic()
    assert ship(agent, release).bytes_sent == 0
    assert time.monotonic() - start < 5
