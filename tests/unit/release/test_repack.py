"""The patched wheel, judged by pip and by importlib.metadata."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed
from ddtree_ops.release.patchset import PatchSet, load_patchset
from ddtree_ops.release.repack import repack

from .patchwright import F2, STOCK, write_series
from .wheelwright import PROGRAM, make_wheel


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    (tmp_path / "stock").mkdir()
    files = {**STOCK, "pkg/tool": b"#!/bin/sh\n", "pkg-1.0.data/purelib/pkg/pure.py": b"p = 1\n"}
    return make_wheel(tmp_path / "stock", "pkg", files, modes={"pkg/tool": PROGRAM})


@pytest.fixture
def patches(tmp_path: Path) -> PatchSet:
    return load_patchset(write_series(tmp_path / "patches"))


def out(tmp_path: Path, name: str = "out") -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


QUESTION = """
import importlib.metadata as m, json, pkg.f, pkg.sub.new
d = m.distribution("pkg")
files = [(str(f), f.hash.value if f.hash else None, f.read_binary().hex()) for f in d.files]
print(json.dumps([d.version, pkg.f.new, pkg.f.f2, pkg.sub.new.value, files]))
"""


def test_pip_installs_it_and_record_is_right(tmp_path: Path, stock: Path, patches: PatchSet) -> None:
    wheel = repack(stock, patches, out(tmp_path))
    version = f"1.0+ddtree.{patches.hash8}"
    assert wheel.name == f"pkg-{version}-py3-none-any.whl"
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True, timeout=120)
    shown = subprocess.run([*pip, "show", "pkg"], check=True, capture_output=True, text=True).stdout
    assert f"\nVersion: {version}\n" in shown
    told = subprocess.run([python, "-I", "-c", QUESTION], check=True, capture_output=True, text=True).stdout
    installed_version, new, f2, value, files = json.loads(told)
    assert (installed_version, new, f2, value) == (version, 1, 22, 5)
    checked = [path for path, digest, content in files if digest and digest == urlsafe(bytes.fromhex(content))]
    assert {"pkg/f.py", "pkg/sub/new.py", "pkg/pure.py", f"pkg-{version}.dist-info/METADATA"} <= set(checked)
    assert os.access(
        tmp_path / f"venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/pkg/tool", os.X_OK
    )


def urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def test_the_same_bytes_later_and_elsewhere(tmp_path: Path, stock: Path, patches: PatchSet) -> None:
    first = repack(stock, patches, out(tmp_path)).read_bytes()
    os.utime(stock, (1, 1))
    old, zone = os.umask(0o077), os.environ.get("TZ")
    os.environ["TZ"] = "Pacific/Chatham"
    time.tzset()
    try:
        assert repack(stock, patches, out(tmp_path, "else")).read_bytes() == first
    finally:
        os.umask(old)
        os.environ.pop("TZ") if zone is None else os.environ.update(TZ=zone)
        time.tzset()


def test_it_is_stored_sorted_and_timeless(tmp_path: Path, stock: Path, patches: PatchSet) -> None:
    with zipfile.ZipFile(repack(stock, patches, out(tmp_path))) as archive:
        infos = archive.infolist()
        assert archive.read("pkg/f.py") == F2
    assert {info.compress_type for info in infos} == {zipfile.ZIP_STORED}
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    names = [info.filename for info in infos]
    assert names[:-1] == sorted(names[:-1])
    assert names[-1].endswith(".dist-info/RECORD")
    assert f"pkg-1.0+ddtree.{patches.hash8}.data/purelib/pkg/pure.py" in names
    assert not [name for name in names if name.startswith("pkg-1.0.")]


def test_without_patches_it_keeps_its_version(tmp_path: Path, stock: Path) -> None:
    assert repack(stock, PatchSet(), out(tmp_path)).name == stock.name


def test_unsound_wheels_are_refused(tmp_path: Path, patches: PatchSet) -> None:
    into = out(tmp_path)
    evil = make_wheel(tmp_path, "pkg", {**STOCK, "../evil": b"x"})
    with pytest.raises(Failed, match="refused the name"):
        repack(evil, patches, into)
    lying = make_wheel(tmp_path, "pkg", STOCK, record={"pkg/g.py": b"g = 1\nh = 9\n"})
    with pytest.raises(Failed, match=r"'pkg/g\.py' does not match its hash in RECORD"):
        repack(lying, patches, into)
    other = make_wheel(tmp_path, "pkg", {**STOCK, "pkg-1.0.dist-info/METADATA": b"Name: pkg\nVersion: 2\n"})
    other = other.rename(tmp_path / "pkg-1.1-py3-none-any.whl")
    with pytest.raises(Failed, match=r"has no pkg-1\.1\.dist-info/METADATA"):
        repack(other, patches, into)
    with pytest.raises(Failed, match="not the name of a wheel"):
        repack(other.rename(tmp_path / "pkg.whl"), patches, into)
    assert not list(into.iterdir())
