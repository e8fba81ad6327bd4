"""The overlay is strictly typed, as the rest of the project is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ddtree_ops.data import data_dir

from .trees import BASE


def test_the_overlay_passes_mypy(tmp_path: Path) -> None:
    overlay = data_dir("patches") / BASE / "overlay"
    files = [str(file.relative_to(overlay)) for file in sorted(overlay.rglob("*.py"))]
    assert files
    config = Path(__file__).with_name("overlay-mypy.ini")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), *files]
    done = subprocess.run(command, cwd=overlay, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
