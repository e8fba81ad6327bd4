"""overlay ddtree_mask, ddtree_verify: the kernels are Triton that its compiler takes, for the GPUs of the inventory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.data import data_dir

from .compile_kernels import WIDTHS
from .trees import BASE


@pytest.mark.parametrize("sm", [90, 120])
def test_the_kernels_compile(sm: int, triton_site: Path, tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does."""
    program, overlay = Path(__file__).with_name("compile_kernels.py"), data_dir("patches") / BASE / "overlay"
    environment = {**os.environ, "PYTHONPATH": str(triton_site), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(program), str(overlay), str(sm)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == len(WIDTHS) + 1 and all(size > 1000 for size in sizes)
