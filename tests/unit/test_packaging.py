"""An installed wheel works outside the repository: everything it reads is in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

#: What a dependency of the CLI may be under: it is installed beside it, never part of what we distribute.
LICENCES = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public|LGPL|Lesser General)\b")
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(CHECKOUT)],
        check=True,
        capture_output=True,
        timeout=280,
    )
    (built,) = out.glob("*.whl")
    site = out / "site"
    zipfile.ZipFile(built).extractall(site)
    return site


def ddtree(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "HOME": str(cwd), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", "from ddtree_ops.cli import main; main()", *words],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )


def test_a_wheel_makes_a_workspace_and_renders(wheel: Path, tmp_path: Path) -> None:
    assert ddtree(wheel, tmp_path, "init", "fleet").returncode == 0
    assert (tmp_path / "fleet" / "inventories" / "ct200.yaml").is_file()
    shown = ddtree(wheel, tmp_path / "fleet", "render", "--host", "local")
    assert shown.returncode == 0, shown.stderr
    assert "ddtree_ops.engine" in shown.stdout
    kimi = ddtree(wheel, tmp_path / "fleet", "render", "--host", "ct200")
    assert "--speculative-ddtree-budget" in kimi.stdout, kimi.stderr


@pytest.mark.parametrize(
    "path",
    [
        "host/agent/recovery.py",
        "exactness/data/prompts-v1.json",
        "release/locks/reference-cp311.txt",
        "engine/pair/target/model.safetensors",
        "engine/pair/draft/model.safetensors",
        "engine/pair/held_out.json",
        "engine/pair/SOURCES.md",
        "py.typed",
    ],
)
def test_a_wheel_carries(wheel: Path, path: str) -> None:
    assert (wheel / "ddtree_ops" / path).is_file()


def dependencies(name: str, found: set[str]) -> set[str]:
    """The names of all that an installed distribution needs, extras aside."""
    for line in distribution(name).requires or ():
        needed = Requirement(line)
        if needed.name.lower() not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            found.add(needed.name.lower())
            dependencies(needed.name, found)
    return found


def licence(name: str) -> str:
    """What a distribution says of its licence, wherever its metadata say it."""
    told = distribution(name).metadata
    classifiers = [one for one in told.get_all("Classifier", []) if one.startswith("License ::")]
    return "; ".join([told.get("License-Expression") or "", (told.get("License") or "")[:200], *classifiers])


def test_every_dependency_may_be_installed_beside_it() -> None:
    names = dependencies("ddtree-ops", set())
    assert {"typer", "paramiko", "httpx", "cryptography"} <= names
    assert {name: licence(name) for name in sorted(names) if not LICENCES.search(licence(name))} == {}
