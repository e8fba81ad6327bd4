"""``ddtree releases`` and ``ddtree prune`` as a user types them, on this machine as a host."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.cli.releases import age
from ddtree_ops.model import init_workspace
from ddtree_ops.release import Release
from ddtree_ops.remote.ship import ship

from ..release.test_build import make
from ..remote.test_ship import Here
from .test_cli import ddtree

FIVE = [f"{n:016x}" for n in range(1, 6)]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Five releases on the host ``local``, nothing deployed."""
    init_workspace(tmp_path / "workspace")
    file = tmp_path / "workspace/inventories/local.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "root": str(tmp_path / "root")}))
    release = make(tmp_path / "build")
    for name in FIVE:
        sha256, size = release.cache.add_blob([f"only in {name}".encode()])
        own = {"path": "share/own", "sha256": sha256, "size": size, "mode": 0o644}
        text = {**release.manifest, "id": name, "smoke": [], "files": [*release.manifest["files"], own]}
        ship(Here(tmp_path / "root"), Release(name, text, release.cache))
    return tmp_path / "workspace"


def there(workspace: Path) -> list[str]:
    return sorted(path.name for path in (workspace.parent / "root/releases").iterdir() if path.name != ".lock")


def answer(workspace: Path, *words: str, code: int = 0) -> dict[str, Any]:
    done = ddtree(workspace, *words, "--host", "local", "--json")
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document["hosts"][0]


def test_shown_first_and_done_only_with_leave(workspace: Path) -> None:
    shown = answer(workspace, "releases")
    assert [row["id"] for row in shown["releases"]] == FIVE[::-1]
    asked = ddtree(workspace, "prune", "--host", "local")
    assert asked.returncode == 2 and "--yes" in asked.stderr
    assert all(name in asked.stdout for name in FIVE) and "one of the 3 newest" in asked.stdout
    assert there(workspace) == FIVE
    done = answer(workspace, "prune", "--keep", "2", "--yes")
    assert [row["id"] for row in done["remove"]] == FIVE[2::-1]
    assert done["bytes"] > 0 and done["blobs"]["count"] == 3
    assert there(workspace) == FIVE[3:]
    assert answer(workspace, "prune", "--keep", "2", "--yes")["summary"] == "nothing to prune"
    assert ddtree(workspace, "prune", "--host", "local", "--keep", "0", "--yes").returncode == 2
    own = {hashlib.sha256(f"only in {name}".encode()).hexdigest() for name in FIVE[3:]}
    left = {path.name for path in (workspace.parent / "root/store").rglob("*") if path.is_file()}
    assert own < left and len(left) > 3


def test_a_host_that_has_nothing_yet(workspace: Path, tmp_path: Path) -> None:
    file = workspace / "inventories/local.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "root": str(tmp_path / "empty")}))
    assert answer(workspace, "releases")["releases"] == []
    assert answer(workspace, "prune", "--yes")["summary"] == "nothing to prune"
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s ago"), (600, "10 min ago"), (7200, "2 h ago"), (86400 * 40, "40 d ago")]
)
def test_ages(seconds: float, said: str) -> None:
    assert age(1e9, 1e9 + seconds) == said
    assert age(None, 1e9) == ""
    assert age(1e9 + 10, 1e9).startswith("2001-")  # installed in the future of a clock that was set back
