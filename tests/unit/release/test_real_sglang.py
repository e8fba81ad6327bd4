"""The real SGLang 0.5.17 (22 MB from pip's index, once): patched, repacked, installed, taken apart and put together."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from ddtree_ops.data import data_dir
from ddtree_ops.release import Cache, Target, build, locked_pythons
from ddtree_ops.release.patchset import load_patchset
from ddtree_ops.release.refresh import Refreshed, refresh
from ddtree_ops.release.repack import repack
from ddtree_ops.release.workflow import Stock, check, edit, stock

from .patchwright import HEADER, write_series

BASE = "sglang-0.5.17"
OWN = data_dir("patches") / BASE
ARGUMENTS = "sglang/srt/server_args.py"


@pytest.fixture(scope="module")
def wheel() -> Stock:
    return stock(BASE, "3.12", Cache())


@pytest.fixture
def patches(tmp_path: Path, wheel: Stock) -> Path:
    """A line at the end of a file of 10,000 lines, and a new file."""
    old = wheel.files[ARGUMENTS].decode()
    lines = [text.splitlines(keepends=True) for text in (old, old + "# the end\n")]
    diff = "".join(difflib.unified_diff(*lines, f"a/{ARGUMENTS}", f"b/{ARGUMENTS}"))
    overlay = {"sglang/srt/speculative/ddtree_x.py": b"VALUE = 1\n"}
    return write_series(tmp_path / "patches", {"0001-end.patch": (HEADER + diff).encode()}, overlay)


def test_a_series_is_sound_for_each_locked_python(patches: Path) -> None:
    assert check(BASE, patches, Cache()) == []
    (patches / "overlay/sglang/srt/speculative/ddtree_x.py").write_bytes(b"import os\n")
    (patches / "overlay/sglang/srt/server_args.py").write_bytes(b"")
    faults = check(BASE, patches, Cache())
    assert len(faults) == len(locked_pythons(BASE)) + 1
    assert "overlay/sglang/srt/server_args.py: the wheel has this file" in faults[0]
    assert "F401" in faults[-1]


@pytest.mark.skipif(not (OWN / "series").is_file(), reason="this checkout has no patches for it")
def test_our_own_series_is_sound_and_in_the_form_that_refresh_writes(tmp_path: Path, wheel: Stock) -> None:
    assert check(BASE, OWN, Cache()) == []
    edit(wheel, load_patchset(OWN), tmp_path / "tree")
    assert refresh(wheel, OWN, tmp_path / "tree") == Refreshed((), ())


def test_into_a_tree_and_back(tmp_path: Path, wheel: Stock, patches: Path) -> None:
    before = {path: path.read_bytes() for path in patches.rglob("*") if path.is_file()}
    edit(wheel, load_patchset(patches), tmp_path / "tree")
    assert (tmp_path / "tree" / ARGUMENTS).read_text().endswith("# the end\n")
    assert refresh(wheel, patches, tmp_path / "tree") == Refreshed((), ())
    assert {path: path.read_bytes() for path in patches.rglob("*") if path.is_file()} == before


QUESTION = """
import base64, hashlib, importlib.metadata as m, json
d = m.distribution("sglang")
wrong = [str(f) for f in d.files if f.hash and f.hash.value
         != base64.urlsafe_b64encode(hashlib.sha256(f.read_binary()).digest()).decode().rstrip("=")]
print(json.dumps([d.version, len(d.files), wrong]))
"""


def test_pip_installs_the_patched_wheel(tmp_path: Path, wheel: Stock, patches: Path) -> None:
    patchset = load_patchset(patches)
    made = repack(Cache().wheels / wheel.name, patchset, tmp_path)
    version = f"0.5.17+ddtree.{patchset.hash8}"
    assert made.name == f"sglang-{version}-cp312-cp312-manylinux_2_34_x86_64.whl"
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv/bin/python")
    pip = (sys.executable, "-m", "pip", "--python", python)
    # The tags are of another Python than this one where the tests run on 3.11; the content is what is judged here.
    with zipfile.ZipFile(made) as archive:
        tag = next(
            line for line in archive.read(f"sglang-{version}.dist-info/WHEEL").decode().splitlines() if "Tag" in line
        )
    assert tag == "Tag: cp312-cp312-manylinux_2_34_x86_64"
    own = made.rename(tmp_path / f"sglang-{version}-py3-none-any.whl")
    subprocess.run(
        [*pip, "install", "-q", "--no-index", "--no-deps", "--no-compile", str(own)], check=True, timeout=200
    )
    told = subprocess.run([python, "-I", "-c", QUESTION], check=True, capture_output=True, text=True).stdout
    shown, files, wrong = json.loads(told)
    assert (shown, wrong) == (version, [])
    assert files > 3800
    assert f"\nVersion: {version}\n" in subprocess.run([*pip, "show", "sglang"], capture_output=True, text=True).stdout


def test_the_patched_engine_is_all_that_a_host_with_an_index_is_sent(patches: Path) -> None:
    made = build(Target(BASE, "3.12", "sm_120", wheels="index"), patches=patches).manifest
    assert 60e6 < made["total_size"] < 90e6
    assert len(made["index_requirements"]) == 210
    assert {"name": "torch", "version": "2.11.0"}.items() <= next(
        entry for entry in made["index_requirements"] if entry["name"] == "torch"
    ).items()
