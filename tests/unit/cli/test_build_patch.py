"""``ddtree build`` and ``ddtree patch`` as a user types them, on a client whose only index is a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.release import Cache, Target, release_id
from tests.documented import documented


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    return tmp_path


def ddtree(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_CACHE_HOME": str(place / "cache"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(place / "wheels"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_ops.cli", *words],
        cwd=place,
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    if "--json" in words:
        documented(words, done.stdout)
    return done


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--engine", "vllm"), "--engine: not 'vllm'"),
        (("--engine", "sglang", "--python", "3.9"), "no lock file sglang-0.5.17-cp39.txt; there are:"),
        (("--engine", "sglang", "--slim"), "nothing is known to be spare on none"),
        (("--engine", "sglang", "--wheels", "some"), "--wheels: not 'some'"),
        (("--engine", "sglang", "--provided", "torhc"), "did you mean torch?"),
        (("--host", "x", "--arch", "sm_90"), "--host takes engine, arch, Python"),
    ],
)
def test_what_cannot_be_built_is_wrong_usage(place: Path, words: tuple[str, ...], complaint: str) -> None:
    done = ddtree(place, "build", *words)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not done.stdout


def test_wheels_that_cannot_be_had_are_a_failure(place: Path) -> None:
    done = ddtree(place, "build", "--engine", "sglang", "--arch", "sm_90")
    assert done.returncode == 1
    assert "pip cannot get the wheels of this release" in done.stderr
    assert "see the configuration of pip" in done.stderr


def test_what_was_built_is_answered_without_its_wheels(place: Path) -> None:
    """A finished release of 30,000 files; how long that takes: `python -m benchmarks.built`."""
    target = Target("sglang-0.5.17", "3.12", "sm_120")
    cache = Cache(place / "cache/ddtree")
    blobs = [cache.add_blob([b"%d" % number]) for number in range(2000)]
    files = [
        {
            "path": f"venv/lib/python3.12/site-packages/p/{n}.py",
            "sha256": blobs[n % 2000][0],
            "size": blobs[n % 2000][1],
            "mode": 420,
        }
        for n in range(30_000)
    ]
    manifest = {
        "id": release_id(target), "files": files, "total_size": 1, "left_out": [], "slim": False,
        "requires": {"provided": {}}, "index_requirements": [],
    }  # fmt: skip
    cache.finish(manifest)
    done = ddtree(place, "build", "--engine", "sglang", "--arch", "sm_120")
    assert done.stdout.strip() == manifest["id"], done.stderr


def test_patch_commands_name_what_is_wrong(place: Path) -> None:
    absent = ddtree(place, "patch", "check", "--patches", "nowhere")
    assert absent.returncode == 1
    assert "nowhere: there is no such directory" in absent.stderr
    (place / "p").mkdir()
    (place / "p/series").write_text("../x.patch\n")
    bad = ddtree(place, "patch", "check", "--patches", "p", "--json")
    assert bad.returncode == 1
    (fault,) = json.loads(bad.stdout)["faults"]
    assert "'../x.patch' is no NAME.patch" in fault
    assert ddtree(place, "patch", "check", "--base", "sglang-9").returncode == 1
    helped = ddtree(place, "patch", "--help").stdout
    assert all(word in helped for word in ("check", "edit", "refresh"))
