"""The overlay is strictly typed, as the rest of the project is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.data import data_dir
from ddtree_ops.release.patchset import load_patchset

from .marks import every_base


@every_base
def test_the_overlay_passes_mypy(base: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As a server has it: what a base takes from another's too."""
    overlay, contents = tmp_path / "overlay", load_patchset(data_dir("patches") / base).overlay
    for file, content in contents.items():
        (overlay / file).parent.mkdir(parents=True, exist_ok=True)
        (overlay / file).write_bytes(content)
    files = sorted(contents)
    assert files
    config = Path(__file__).with_name("overlay-mypy.ini")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(config),
        "--cache-dir",
        str(tmp_path / "cache"),
        *files,
    ]
    done = subprocess.run(command, cwd=overlay, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
