"""Makes small wheels, sound or not, and the sources that a release adds to them."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from ddtree_ops.release.cache import file_sha256
from ddtree_ops.release.lock import Lock, Pin

LINK = 0o120777
PROGRAM = 0o100755
PLAIN = 0o100644


def make_wheel(
    directory: Path,
    name: str,
    files: dict[str, bytes],
    *,
    modes: dict[str, int] | None = None,
    record: dict[str, bytes] | None = None,
    record_twice: bool = False,
    requires: tuple[str, ...] = (),
) -> Path:
    """``record``: contents that RECORD is made of where they differ from ``files``. ``requires``: Requires-Dist."""
    path = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{info}/METADATA": _metadata(name, requires),
    }
    lines = []
    for member, content in {**files, **(record or {})}.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{member},sha256={digest},{len(content)}\n")
    lines.append(f"{info}/RECORD,,\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in {**files, f"{info}/RECORD": "".join(lines).encode()}.items():
            entry = zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (modes or {}).get(member, PLAIN) << 16
            archive.writestr(entry, content)
        if record_twice:
            archive.writestr("other-1.0.dist-info/RECORD", "")
    return path


def _metadata(name: str, requires: tuple[str, ...]) -> bytes:
    extras = {extra for need in requires for extra in re.findall(r"extra == '(\w+)'", need)}
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    needs += "".join(f"Provides-Extra: {extra}\n" for extra in sorted(extras))
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}".encode()


def make_package(directory: Path) -> Path:
    """A package directory with an engine and a pair, and with what does not belong into a release."""
    for name, content in {
        "__init__.py": b"__version__ = '1'\n",
        "engine/__init__.py": b"import torch\n",
        "engine/walk.py": b"STEPS = 3\n",
        "engine/pair/target/config.json": b"{}",
        "engine/pair/.hidden": b"no",
        "engine/__pycache__/walk.cpython-311.pyc": b"no",
        "engine/walk.py.orig": b"no",
        "deploy/run.py": b"no",
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


TORCH = {
    "torch/__init__.py": b"from ._C import value\n",
    "torch/_C.py": b"value = 7\n",
    "torch/bin/torch_shm_manager": b"#!/bin/sh\n",
    "torch/bin/test_jit": b"big",
    "torch/include/ATen.h": b"header",
    "torch/lib/libc10.a": b"archive",
    "torch/py.typed": b"",
    "stub-1.0.data/scripts/torchrun": b"#!python\n",
    "stub-1.0.data/purelib/functorch/__init__.py": b"",
    "uvicorn/__init__.py": b"",
    "uvicorn/lifespan/__init__.py": b"",
    "uvicorn/lifespan/on.py": b"",
    "uvicorn/loops/__init__.py": b"",
    "uvicorn/loops/auto.py": b"",
    "uvicorn/protocols/__init__.py": b"",
    "uvicorn/protocols/http/__init__.py": b"",
    "uvicorn/protocols/http/auto.py": b"",
}


def make_stub(directory: Path) -> Path:
    """One wheel that has what a reference release imports."""
    directory.mkdir(parents=True, exist_ok=True)
    return make_wheel(directory, "stub", TORCH, modes={"torch/bin/torch_shm_manager": PROGRAM})


def lock_of(*wheels: Path, python: str = "3.11") -> Lock:
    pins = tuple(Pin(wheel.name.split("-")[0], "1.0", file_sha256(wheel)) for wheel in wheels)
    return Lock(python, "x86_64", "2.17", None, pins, "")
