"""What is needed is never pruned, whoever needs it; what is not needed is gone, blobs and leftovers too."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .box import Box, Refused

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def manifest(n: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Release ``n``: one file of its own, one that all share; and its blobs."""
    files = {"own": f"only in {n}".encode(), "shared": b"in all"}
    held = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
    rows = [
        {"path": f"share/{name}", "sha256": sha, "size": len(held[sha])} for name, sha in zip(files, held, strict=True)
    ]
    fit = {"python": VERSION}
    return {"format": 2, "id": f"{n:016x}", "files": rows, "requires": fit, "smoke": []}, held


@pytest.fixture
def six(box: Box, tmp_path: Path) -> list[str]:
    """Six releases: one installed, the others made from it, which is faster."""
    for n in range(1, 7):
        text, held = manifest(n)
        home = box.root / "releases" / str(text["id"])
        if n == 1:
            staging = tmp_path / "staging"
            staging.mkdir(0o700)
            for sha, data in held.items():
                (staging / sha).write_bytes(data)
            assert box.call("install", manifest=text, staging=str(staging))["installed"]
            continue
        shutil.copytree(box.root / "releases" / f"{1:016x}", home, symlinks=True)
        home.chmod(0o755)
        (home / "installed.json").unlink()
        (home / "manifest.json").unlink()
        (home / "manifest.json").write_text(json.dumps(text))
        (home / "installed.json").write_text(json.dumps({"seq": n, "installed": 1.7e9 + n}))
        for sha, data in held.items():
            (box.root / "store" / sha[:2]).mkdir(mode=0o700, exist_ok=True)
            (box.root / "store" / sha[:2] / sha).write_bytes(data)
    return [f"{n:016x}" for n in range(1, 7)]


def there(box: Box) -> set[str]:
    return {path.name for path in (box.root / "releases").iterdir() if path.name != ".lock"}


def blobs(box: Box) -> set[str]:
    return {path.read_text() for path in (box.root / "store").rglob("*") if path.is_file()}


def test_a_table_of_who_uses_what(box: Box, six: list[str]) -> None:
    box.deploy("first-1", release=six[0])
    box.deploy("second-2", release=six[1])
    box.deploy("third-3", release=six[2])
    box.deploy("fourth-4", release=six[3], passed=False)
    told = box.call("releases")
    assert ids(told["releases"]) == six[::-1]
    roles = {row["id"]: [(use["generation"], use["role"]) for use in row["users"]] for row in told["releases"]}
    assert roles == {
        six[0]: [(1, "older generation")],
        six[1]: [(2, "rollback")],
        six[2]: [(3, "running")],
        six[3]: [(4, "older generation")],
        six[4]: [],
        six[5]: [],
    }
    assert all(row["whole"] and row["bytes"] > 1000 and row["installed"] for row in told["releases"])


def test_what_a_service_needs_stays(box: Box, six: list[str]) -> None:
    box.deploy("first-1", release=six[1])
    box.deploy("second-2", release=six[0])
    shown = box.call("prune", keep=1, dry=True)
    assert ids(shown["remove"]) == [six[4], six[3], six[2]]
    assert there(box) == set(six)
    assert blobs(box) == {"in all", *(f"only in {n}" for n in range(1, 7))}
    done = box.call("prune", keep=1, dry=False, expect=ids(shown["remove"]), who="ann", client="desk")
    assert ids(done["keep"]) == [six[5], six[1], six[0]]
    assert there(box) == {six[0], six[1], six[5]}
    assert blobs(box) == {"in all", "only in 1", "only in 2", "only in 6"}
    assert box.who() == "second-2"
    assert box.call("prune", keep=1, dry=False, expect=[])["remove"] == []
    # Both can still be deployed, and what was pruned comes back by shipping it.
    assert box.deploy("third-3", release=six[1])["event"] == "confirmed"


def test_order_is_by_installation_whatever_the_clock_said(box: Box, six: list[str]) -> None:
    for n, release in enumerate(six):
        marker = box.root / "releases" / release / "installed.json"
        told = json.loads(marker.read_text())
        marker.parent.chmod(0o755)
        marker.chmod(0o644)
        marker.write_text(json.dumps({**told, "installed": told["installed"] - n * 365 * 86400}))
    assert ids(box.call("prune", keep=2, dry=True)["keep"]) == [six[5], six[4]]


def test_a_process_that_runs_from_a_release_keeps_it(box: Box, six: list[str]) -> None:
    """Started by hand, known to no service."""
    home = box.root / "releases" / six[0]
    with subprocess.Popen([str(home / "venv/bin/python"), "-I", "-c", "input()"], stdin=subprocess.PIPE) as process:
        shown = box.call("prune", keep=1, dry=True)
        process.kill()
    assert ids(shown["keep"]) == [six[5], six[0]]
    assert shown["keep"][1]["why"] == [f"process {process.pid}"]


def test_not_while_a_deploy_is_under_way(box: Box, six: list[str]) -> None:
    box.deploy("first-1", release=six[0])
    box.call("apply", plan=box.plan("second-2", release=six[1]))
    box.wait("second-2", "gate", "begin")
    with pytest.raises(Refused) as refused:
        box.call("prune", keep=1, dry=False, expect=None)
    assert refused.value.kind == "locked"
    shown = box.call("prune", keep=1, dry=True)  # a look needs no lock
    assert ids(shown["keep"]) == [six[5], six[1], six[0]]
    box.verdict("second-2")
    box.end("second-2")
    assert there(box) == set(six)


def test_an_unfinished_deploy_keeps_both_ends(box: Box, six: list[str]) -> None:
    box.deploy("first-1", release=six[0])
    box.call("apply", plan=box.plan("second-2", release=six[1]))
    box.wait("second-2", "gate", "begin")
    os.kill(box.applier(), 9)
    done = box.call("prune", keep=1, dry=False, expect=None)
    assert ids(done["keep"]) == [six[5], six[1], six[0]]
    box.call("recover", reason="test")
    assert box.who() == "first-1"


def test_what_is_no_longer_as_shown_is_not_done(box: Box, six: list[str]) -> None:
    shown = box.call("prune", keep=1, dry=True)
    box.deploy("first-1", release=six[2])
    with pytest.raises(Refused) as refused:
        box.call("prune", keep=1, dry=False, expect=ids(shown["remove"]))
    assert refused.value.kind == "moved"
    assert there(box) == set(six)


def test_a_damaged_state_or_manifest_stops_it(box: Box, six: list[str]) -> None:
    box.deploy("first-1", release=six[0])
    manifest = box.root / "releases" / six[0] / "manifest.json"
    manifest.parent.chmod(0o755)
    text = manifest.read_text()
    manifest.chmod(0o644)
    manifest.write_text("{")
    with pytest.raises(Refused, match="manifest of release"):
        box.call("prune", keep=1, dry=False, expect=None)
    manifest.write_text(text)
    (box.dir / "generations/1/generation.json").rename(box.dir / "away")
    with pytest.raises(Refused, match="generation 1 is missing"):
        box.call("prune", keep=1, dry=False, expect=None)
    (box.dir / "away").rename(box.dir / "generations/1/generation.json")
    (box.dir / "state.json").write_text("{")
    with pytest.raises(Refused) as refused:
        box.call("prune", keep=1, dry=False, expect=None)
    assert refused.value.kind == "stuck"
    assert there(box) == set(six)


def test_leftovers_go_and_what_is_not_ours_stays(box: Box, six: list[str], tmp_path: Path) -> None:
    base, outside = box.root / "releases", tmp_path / "outside"
    (base / f"{six[0]}.tmp-0123abcd/venv").mkdir(parents=True)
    (base / ("ab" * 8)).mkdir()
    (base / "notes").mkdir()
    (outside / "venv").mkdir(parents=True)
    (base / ("cd" * 8)).symlink_to(outside)
    (box.root / "store/.0.tmp").write_text("x")
    names = [f"{n}{'0' * 63}" for n in "123"]
    stale, fresh, link = (tmp_path / f"ddtree-staging-{user}" for user in ("stale", "fresh", "link"))
    for directory in (stale, fresh):
        directory.mkdir()
        (directory / names[0]).write_text("x")
        (directory / f"{names[1]}.part").write_text("x")
        (directory / names[2]).symlink_to(outside)
    link.symlink_to(outside)
    for path in (*stale.iterdir(), stale):
        os.utime(path, (0, 0), follow_symlinks=False)
    done = box.call("prune", keep=6, dry=False, expect=None, staging=str(tmp_path / "ddtree-staging-x"))
    assert there(box) == {*six, "notes"}
    assert set(ids(done["remove"])) == {f"{six[0]}.tmp-0123abcd", "ab" * 8, "cd" * 8}
    assert not (box.root / "store/.0.tmp").exists()
    assert (outside / "venv").is_dir()
    assert not stale.exists() and link.is_symlink()
    assert len(list(fresh.iterdir())) == 3
