"""overlay ddtree_mask, ddtree_verify, ddtree_attention: Triton's compiler takes them, for the GPUs of the inventory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.data import data_dir

from .compile_kernels import SHAPES, WIDTHS
from .trees import BASE

SHARED_KIB = {90: 227, 120: 99}
"""Shared memory that a program may have, by CUDA's table of compute capabilities."""


@pytest.mark.parametrize("sm", SHARED_KIB)
def test_the_kernels_compile(sm: int, triton_site: Path, tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does."""
    program, overlay = Path(__file__).with_name("compile_kernels.py"), data_dir("patches") / BASE / "overlay"
    environment = {**os.environ, "PYTHONPATH": str(triton_site), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(program), str(overlay), str(sm)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [line.split() for line in done.stdout.splitlines()]
    assert len(made) == len(WIDTHS) + 4 + 3 * len(SHAPES)
    assert all(int(size) > 1000 and int(shared) <= 1024 * SHARED_KIB[sm] for _, size, shared in made), done.stdout
