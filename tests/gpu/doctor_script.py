"""Prints one shell script for a GPU machine: the collector and every active check, on whatever Python is there.

    python -m tests.gpu.doctor_script --arch sm_90 >doctor.sh        # here
    sh doctor.sh python3 >doctor.jsonl                               # there: facts, then a line a check

Nothing of ddtree is needed there. ``python3`` is the one that has torch and triton; ``tree-verify`` wants SGLang in it
as well and says so where it is not. The facts can be judged here: ``ddtree doctor --host H --facts FIRST-LINE``.
"""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from ddtree_ops.doctor.active import ACTIVE, BOOT, source
from ddtree_ops.doctor.collector import script
from ddtree_ops.model.archs import arch_table


def requests(arch: str, gpus: int) -> dict[str, dict[str, Any]]:
    """What each active check is asked on a machine of ``gpus`` cards of that arch."""
    known = arch_table().archs[arch]
    devices = [f"cuda:{index}" for index in range(gpus)]
    asked: dict[str, dict[str, Any]] = {
        "imports": {
            "modules": ["torch", "triton"],
            "code": known.code,
            "count": gpus,
            "capability": known.compute_capability,
            "shared_memory": known.shared_memory_kib * 1024,
        },
        "ptxas": {"tool": known.ptxas, "target": known.gpu_name},
        "triton-kernel": {"devices": devices},
        "tree-verify": {"devices": devices[:1], "dtypes": ["bfloat16", "float32"]},
        "p2p-copy": {"devices": devices, "bytes": 64 << 20},
    }
    if gpus > 1:
        sizes = {"tp_sizes": [gpus], "sizes": [4096, 64 << 20]}
        asked["all-reduce"] = {**sizes, "backend": "nccl", "limit_s": 90.0}
    return asked


def shell(arch: str, gpus: int) -> str:
    """The whole script."""
    lines = [
        "#!/bin/sh",
        "python=${1:-python3}",
        f"printf '%s\\n' {shlex.quote(script())} | sh -s -- '{{\"limit_s\": 20}}'",
    ]
    for name, asked in requests(arch, gpus).items():
        text = shlex.quote(source(ACTIVE[name].script))
        boot, words = shlex.quote(BOOT), shlex.quote(json.dumps(asked))
        lines.append(f'printf \'{{"check": "{name}"}} \'')
        lines.append(
            f"printf '%s\\n' {text} | timeout {ACTIVE[name].limit_s:.0f} \"$python\" -c {boot} {words} || echo"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(arch_table().archs), default="sm_90")
    parser.add_argument("--gpus", type=int, default=1)
    given = parser.parse_args()
    print(shell(given.arch, given.gpus), end="")
