"""An installed release as the active checks meet it: a venv below a root, with what a test puts into it.

Triton, numpy and SGLang's kernels are the pinned wheels' own files. Of SGLang only the attention kernels are laid out:
its packages' ``__init__`` and the three questions about the device that the kernels ask are the test's.
"""

from __future__ import annotations

import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree_ops.release.cache import Cache
from ddtree_ops.release.fetch import fetch
from ddtree_ops.release.lock import load_lock, locked_pythons

BASE = "sglang-0.5.17"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
KERNELS = "sglang/kernels/ops/attention/"
UTILS = "def is_cuda():\n    return False\n\n\nis_hip = is_gfx95_supported = is_npu = is_musa = is_cuda\n"


def wheel(name: str) -> Path:
    """A pinned wheel for this Python, from the cache or by pip."""
    if PYTHON not in locked_pythons(BASE):
        pytest.skip(f"{BASE} is not locked for Python {PYTHON}")
    lock = load_lock(BASE, PYTHON)
    return fetch(replace(lock, pins=tuple(pin for pin in lock.pins if pin.name == name)), Cache())[0]


def triton_site(directory: Path) -> Path:
    """Triton and the numpy that its interpreter works with, as pip would lay them out."""
    for name in ("triton", "numpy"):
        with zipfile.ZipFile(wheel(name)) as archive:
            archive.extractall(directory)
    for program in (directory / "triton/backends/nvidia/bin").iterdir():
        program.chmod(0o755)
    return directory


def kernel_site(directory: Path) -> Path:
    """SGLang's attention kernels, unchanged."""
    with zipfile.ZipFile(wheel("sglang")) as archive:
        for name in archive.namelist():
            if name.startswith(KERNELS) and name.endswith(".py") and name != f"{KERNELS}__init__.py":
                archive.extract(name, directory)
    for package in ("sglang", "sglang/kernels", "sglang/kernels/ops", "sglang/kernels/ops/attention", "sglang/srt"):
        (directory / package).mkdir(parents=True, exist_ok=True)
        (directory / package / "__init__.py").write_text("")
    (directory / "sglang/srt/utils.py").write_text(UTILS)
    return directory


def install(root: Path, release: str, sites: list[Path], startup: str = "") -> Path:
    """``<root>/releases/<release>/venv`` that sees ``sites``, then this Python's own packages.

    ``startup`` is Python that runs whenever the venv's Python starts.
    """
    venv = root / "releases" / release / "venv"
    packages = venv / "lib" / f"python{PYTHON}" / "site-packages"
    packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    own = [str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[3])]
    (packages / "a.pth").write_text("\n".join([*map(str, sites), *own]) + "\n")
    if startup:
        (packages / "ddtree_startup.py").write_text(startup)
        (packages / "b.pth").write_text("import ddtree_startup\n")
    return venv
