"""Assembles a small kernel for the GPU's arch with the ptxas that Triton would call."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from .prelude import run, wrong

PTX = """\
.version {version}
.target {target}
.address_size 64
.visible .entry ddtree(.param .u64 out)
{{
    .reg .b64 %a;
    .reg .b32 %b;
    ld.param.u64 %a, [out];
    mov.u32 %b, 7;
    st.global.u32 [%a], %b;
    ret;
}}
"""
#: CUDA release -> the newest PTX that its ptxas reads (PTX ISA, "Release Notes"); a newer release reads these too.
PTX_VERSIONS = {"12.4": "8.4", "12.8": "8.7", "12.9": "8.8", "13.0": "9.0"}


def chosen(tool: str) -> Path:
    """The program Triton calls: its environment variable's, where that can be run, else the one it brings."""
    variable = f"TRITON_{tool.upper().replace('-', '_')}_PATH"
    given = os.environ.get(variable)
    if given and os.access(given, os.X_OK):
        return Path(given)
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        raise RuntimeError(f"triton is not installed, and {variable} names no program")
    return Path(found.origin).parent / "backends" / "nvidia" / "bin" / tool


def main(request: dict[str, Any]) -> dict[str, Any]:
    """``tool``: ptxas or ptxas-blackwell; ``target``: such as sm_103a."""
    program, target = chosen(request["tool"]), request["target"]
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)
    release = re.search(r"release (\d+\.\d+)", told.stdout)
    if release is None:
        return wrong(f"{program} --version: {(told.stdout + told.stderr).strip()[:300]}", "a CUDA release")
    known = [each for each in PTX_VERSIONS if _numbers(each) <= _numbers(release[1])]
    if not known:
        return wrong(f"{program} is of CUDA {release[1]}", f"CUDA {next(iter(PTX_VERSIONS))} or newer")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(PTX.format(version=PTX_VERSIONS[known[-1]], target=target), encoding="utf-8")
        words = [str(program), f"--gpu-name={target}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        made = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if made.returncode != 0:
        said = (made.stderr + made.stdout).strip()[:400]
        return wrong(f"{program} (CUDA {release[1]}) --gpu-name={target}: {said}", f"a ptxas that knows {target}")
    return {"ok": True, "ptxas": str(program), "cuda": release[1], "target": target}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


if __name__ == "__main__":
    run(main)
