"""Shipping on this machine, with the real host script; over ssh: tests/hosts/test_ship.py."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release import Release
from ddtree_ops.remote import Agent, connect, ship
from ddtree_ops.remote.ship import tar_stream

from ..release.test_build import make
from .endpoint import Entry


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return make(tmp_path / "build")


def agent(root: Path) -> Agent:
    return Agent(connect(Entry()), str(root), "svc", "process")


def test_ship_installs_and_the_second_time_does_nothing(release: Release, tmp_path: Path) -> None:
    root = tmp_path / "root"
    report = ship(agent(root), release)
    assert report == (len(release.manifest["files"]), 0, release.manifest["total_size"])
    installed = root / "releases" / release.id
    for file in release.manifest["files"]:
        path = installed / file["path"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
        assert path.stat().st_mode & 0o777 == file["mode"] & 0o555
        # Never a hard link: one write would damage every release, or the client's cache.
        assert path.stat().st_nlink == 1
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert ship(agent(root), release).bytes_sent == 0
    assert {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.suffix != ".lock"
    }.items() <= before.items()
    assert not list(release.cache.directory.glob("staging-*"))
    assert all(release.blob(file["sha256"]).is_file() for file in release.manifest["files"])


def test_a_damaged_cache_is_refused_by_the_host(release: Release, tmp_path: Path) -> None:
    victim = release.blob(release.manifest["files"][0]["sha256"])
    victim.write_bytes(bytes(len(victim.read_bytes())))
    with pytest.raises(Failed, match=f"{victim.name} has sha256"):
        ship(agent(tmp_path / "root"), release)
    assert not (tmp_path / "root/releases").exists()


def test_tar_stream_is_a_gzipped_tar_of_the_blobs(tmp_path: Path) -> None:
    contents = {f"{n:064x}": os.urandom(n) for n in (0, 1, 511, 512, 513, 700_000)}
    blobs = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        blobs.append((name, len(content), tmp_path / name))
    seen: list[tuple[int, int]] = []
    data = b"".join(tar_stream(blobs, lambda done, total: seen.append((done, total))))
    total = sum(map(len, contents.values()))
    assert seen[-1] == (total, total)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data)), mode="r:") as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    assert found == contents


def test_a_blob_that_shrank_ends_the_stream(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"short")
    with pytest.raises(Failed, match="shorter"):
        b"".join(tar_stream([("b", 6, tmp_path / "b")], lambda done, total: None))
