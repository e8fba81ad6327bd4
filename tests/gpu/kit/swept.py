"""Selection ``sweep``: ``ddtree sweep`` and ``ddtree report`` on this machine. Selection ``bench``: SGLang's
bench_serving beside the sweep's client on a server that was deployed.

Services come and go by the deploy path, one at a time, so nothing else should run beside: give the padded pair
(benchmarks/gpu/pad) and no further selection. Nothing is deployed before a sweep, so that nothing is started again
between two of its starts. The same command goes on with a run that its time limit ended, where FOLDER names a directory
that has outlived the call.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from .deployed import PORT, ROOT, SERVICE, base_of, end, make_release, make_workspace, run_words, typed
from .lab import Lab

RUN, FOLDER, EARLIER = "sweeps/gpu", "DDTREE_GPU_SWEEP", "DDTREE_GPU_SWEEP_RECORDS"
"""FOLDER, EARLIER: variables with the place of the workspace, and with the records of a run begun on a machine that is
gone."""
GRID, PREFILL = "DDTREE_GPU_SWEEP_GRID", "DDTREE_GPU_SWEEP_PREFILL_GRAPHS"
"""Variables: the sweep's --pair and -c, as ``8/4,16/4:1,8``; the sizes of prefills in CUDA graphs, as ``64,128``."""
REPORT_S = 60.0
"""Kept for the cell that the time limit finds begun, the report and the evidence."""
DEFAULT = "8/4,16/4:1,8,32,64"


async def run_sweep(lab: Lab) -> None:
    given = os.environ.get(FOLDER)
    folder = Path(given) if given else lab.caches.parent / "sweep"
    run, compiled = folder / "workspace" / RUN, folder / "root" / "cache" / SERVICE
    if not folder.is_dir():
        await asyncio.to_thread(make_workspace, lab, folder, _base(lab.pair))
        await make_release(lab, folder)
        if (lab.caches / SERVICE).is_dir():
            shutil.copytree(lab.caches / SERVICE, compiled)
        if EARLIER in os.environ:
            run.mkdir(parents=True)
            shutil.copy(os.environ[EARLIER], run / "records.jsonl")
    stand_in = lab.trees is None
    minutes = max(1.0, (lab.left_s() - REPORT_S) / 60)
    small = ["--max-tokens", "16", "--rows", "4"] if stand_in else ["--max-tokens", "128"]
    pairs, _, loads = os.environ.get(GRID, "8/4:1,2" if stand_in else DEFAULT).partition(":")
    words = ["sweep", "--pair", pairs, "-c", loads, "--prompts", "held-out", *small, "--run", RUN, "--yes"]
    try:
        # 3: the time limit came first
        if not await typed(lab, folder, "sweep", [*words, "--time-limit", f"{minutes:.1f}"], 0, 3):
            return
        await typed(lab, folder, "report", ["report", RUN], 0)
    finally:
        await run_words(folder, ["logs"], lab.results.evidence / "sweep-service.log")
        end(folder / "root")
        if run.is_dir():
            shutil.copytree(run, lab.results.evidence / "sweep", dirs_exist_ok=True)
        if compiled.is_dir() and not stand_in:
            shutil.copytree(compiled, lab.caches / SERVICE, dirs_exist_ok=True)


async def run_bench(lab: Lab) -> None:
    """AR, then the 8/4 tree, each with both clients."""
    folder = lab.caches.parent / "bench"
    await asyncio.to_thread(make_workspace, lab, folder, _base(lab.pair))
    await make_release(lab, folder)
    compiled = folder / "root" / "cache" / SERVICE
    if (lab.caches / SERVICE).is_dir():
        shutil.copytree(lab.caches / SERVICE, compiled)
    try:
        for profile in ("ar", "b8k4"):
            deploy = ["deploy", "--profile", profile, "--yes", "--no-snapshot"]
            if await typed(lab, folder, f"deploy {profile}", deploy, 0):
                await _bench(lab, folder, profile)
    finally:
        await run_words(folder, ["logs"], lab.results.evidence / "bench-service.log")
        end(folder / "root")
        if compiled.is_dir() and lab.trees is not None:
            shutil.copytree(compiled, lab.caches / SERVICE, dirs_exist_ok=True)


async def _bench(lab: Lab, folder: Path, profile: str) -> None:
    """Both clients on one service."""
    out = lab.results.evidence / f"bench-serving-{profile}"
    command = [sys.executable, "-m", "benchmarks.bench_serving", "compare", "--url", f"http://127.0.0.1:{PORT}"]
    command += ["--model", str(lab.pair / "target"), "--per-slot", "4", "--out", str(out)]
    command += ["-c", "1,2", "--max-tokens", "16"] if lab.trees is None else ["-c", "1,8", "--max-tokens", "256"]
    # the release has bench_serving; where the reference engine stands in, `bench_serving prepare site` was called
    if lab.trees is None:
        command += ["--site", str(ROOT / "site")]
    else:
        (python,) = folder.glob("root/releases/*/venv/bin/python")
        command += ["--bench-python", str(python)]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    lab.results.evidence.joinpath(f"bench-serving-{profile}.log").write_bytes(said)
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if "within 3 %" in line]
    lab.results.add("bench", profile, "bench_serving", process.returncode == 0, said=lines)


def _base(pair: Path) -> dict[str, Any]:
    """The pair in bfloat16, with most of the card for itself."""
    config = json.loads((pair / "target" / "config.json").read_text())
    base = base_of(pair)
    words = [*base["extra_args"], "48", "64"]  # the sizes of graphs come last
    if sizes := os.environ.get(PREFILL):
        words.remove("--disable-prefill-cuda-graph")
        words += ["--cuda-graph-bs-prefill", *sizes.split(",")]
    return base | {
        "extra_args": words,
        "dtype": "bfloat16",
        "vocab_size": config["vocab_size"],
        "memory_fraction": 0.8,
        "min_accept_length": None,
        "exactness": {"policy": "near-tie", "concurrency": [1, 8], "max_new_tokens": 48, "time_limit_s": 120},
    }
