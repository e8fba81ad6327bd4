"""Selection ``deploy``: the project's own way onto a host, which is this machine: plan, deploy, prove, roll back.

There is no network to fetch wheels by, so the release comes in the client's cache: what ``ddtree build --slim`` made,
where tests/gpu/pack brought that, else one made of the patched tree's files. From there on it is what operators type.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from ddtree_ops.data import data_dir
from ddtree_ops.model import Deployment, load_workspace, resolve
from ddtree_ops.release import Cache, release_id
from ddtree_ops.release.build import FORMAT, SGLANG_SMOKE, site_packages
from ddtree_ops.release.lock import load_lock
from ddtree_ops.release.patchset import load_patchset

from .lab import Lab

ROOT = Path(__file__).resolve().parents[3]
SERVICE, PORT = "tiny", 30900
PROVIDED = {"torch": "2.11.0"}
ANOTHER_S = 150.0
"""What one more deploy may take; it is not begun with less."""


async def run_deploy(lab: Lab) -> None:
    """As an operator would: from an empty workspace to a proven service, another profile, and back."""
    folder = lab.caches.parent / "deploy"
    await asyncio.to_thread(make_workspace, lab, folder, base_of(lab.pair))
    try:
        await make_release(lab, folder)
        for case, words, code in (
            ("plan", ["plan", "--profile", "b8k4"], 3),
            ("deploy b8k4", ["deploy", "--profile", "b8k4", "--yes", "--no-snapshot"], 0),
            ("status", ["status"], 0),
            ("verify-exactness", ["verify-exactness"], 0),
        ):
            if not await typed(lab, folder, case, words, code):
                return
        for case, words in (
            ("deploy ar", ["deploy", "--profile", "ar", "--yes", "--no-snapshot"]),
            ("rollback", ["rollback", "--yes"]),
        ):
            if lab.left_s() < ANOTHER_S:
                lab.results.add("deploy", "host local", case, None, why="no time left for it")
                return
            if not await typed(lab, folder, case, words, 0):
                return
    finally:
        await run_words(folder, ["logs"], lab.results.evidence / "deploy-service.log")
        end(folder / "root")


async def make_release(lab: Lab, folder: Path) -> None:
    """The release that the service will be made of, told in a row; the reference engine's the deploy makes itself."""
    if lab.trees is None:
        return
    begun = time.monotonic()
    release, files, size = await asyncio.to_thread(_built if lab.trees.cache else _release, lab, folder)
    told = {"release": release, "files": files, "mb": size / 1e6, "seconds": time.monotonic() - begun}
    source = "ddtree build --slim" if lab.trees.cache else "the tree"
    lab.results.add("deploy", "host local", f"release from {source}", True, **told)


def end(root: Path) -> None:
    """Kills what was started from ``root``. The project's own ``stop`` waits for a deploy that was broken off."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{root}/".encode() in process.joinpath("cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


async def typed(lab: Lab, folder: Path, case: str, words: list[str], *codes: int) -> bool:
    """One command, as a row, right where it exits with one of ``codes``; what it said goes to the evidence."""
    name = case.replace(" ", "-")
    begun = time.monotonic()
    got, document = await run_words(folder, [*words, "--json"], lab.results.evidence / f"deploy-{name}.txt")
    hosts = document.get("hosts") or [{}]
    verdict = hosts[0].get("verdict") or (hosts[0].get("outcome") or {}).get("verdict") or {}
    figures: dict[str, Any] = {"exit": got, "seconds": time.monotonic() - begun, "said": hosts[0].get("summary")}
    if verdict:
        figures |= {"kind": verdict.get("kind"), "accept_length": verdict.get("accept_length")}
    lab.results.add("deploy", "host local", case, got in codes, **figures)
    return got in codes


async def run_words(folder: Path, words: list[str], log: Path) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON document on stdout, {} where there is none)."""
    command = [sys.executable, "-m", "ddtree_ops.cli", *words]
    path = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"}
    if (folder / "cache").is_dir():
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder / "workspace",
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, said = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    log.write_bytes(b"$ ddtree " + " ".join(words).encode() + b"\n" + said + b"\n" + out)
    try:
        document = json.loads(out)
    except ValueError:
        document = {}
    assert process.returncode is not None
    return process.returncode, document if isinstance(document, dict) else {}


def make_workspace(lab: Lab, folder: Path, base: dict[str, Any]) -> None:
    """The packaged inventory, with one host and, for SGLang, ``base``."""
    profiles = folder / "workspace" / "inventories" / "profiles"
    profiles.mkdir(parents=True)
    packaged = data_dir("inventories")
    for name in ("ar", "b8k4", "tiny"):
        (profiles / f"{name}.yaml").write_text((packaged / "profiles" / f"{name}.yaml").read_text())
    service = {"base": "tiny", "profile": "b8k4", "port": PORT}
    host: dict[str, Any] = {
        "address": "127.0.0.1",
        "transport": "local",
        "supervisor": "process",
        "root": str(folder / "root"),
        "gpus": {"count": 0, "name": "none", "arch": "none", "memory_gib": 0, "interconnect": "none"},
        "services": {SERVICE: service},
    }
    if lab.trees is not None:
        host["gpus"] = {"count": 1, "name": "H200", "arch": "sm_90", "memory_gib": 141, "interconnect": "none"}
        provided = lab.trees.release()["requires"]["provided"] if lab.trees.cache else PROVIDED
        host["release"] = {"slim": True, "provided": [f"{name}=={version}" for name, version in provided.items()]}
        host["services"] = {SERVICE: {**service, "base": "tiny-sglang", "gpus": [0]}}
        (profiles / "tiny-sglang.yaml").write_text(yaml.safe_dump(base))
    (folder / "workspace" / "inventories" / "local.yaml").write_text(yaml.safe_dump(host, sort_keys=False))


def base_of(pair: Path) -> dict[str, Any]:
    """The tiny pair on SGLang in fp32, with the arguments of the lab's servers."""
    graphs = [str(size) for size in (1, 2, 4, 8, 16, 24, 32, 40)]
    return {
        "engine": "sglang",
        "model": str(pair / "target"),
        "drafter": str(pair / "draft"),
        "block_size": 8,
        "vocab_size": 2048,
        "dtype": "float32",
        "memory_fraction": 0.5,
        "max_running_requests": 40,
        "extra_args": [
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-total-tokens", "65536"),
            *("--disable-prefill-cuda-graph", "--random-seed", "1", "--cuda-graph-bs-decode", *graphs),
        ],
        "load_timeout_s": 300,
        "stop_timeout_s": 20,
        "min_accept_length": 2.0,
        "exactness": {
            "policy": "exact",
            "epsilon_roundings": 0,
            "concurrency": [1, 8],
            "max_new_tokens": 48,
            "time_limit_s": 200,
        },
    }


def deployment_of(folder: Path) -> Deployment:
    return resolve(load_workspace(folder / "workspace"), "local", SERVICE, "b8k4")


def _built(lab: Lab, folder: Path) -> tuple[str, int, int]:
    """The release that was brought, where the client will look for it: (id, files, bytes).

    Raises RuntimeError when it is not the one that the deploy will ask for.
    """
    from ddtree_ops.deploy.fitting import target

    assert lab.trees is not None and lab.trees.cache is not None
    (folder / "cache").mkdir()
    (folder / "cache" / "ddtree").symlink_to(lab.trees.cache)
    manifest = lab.trees.release()
    wanted = release_id(target(deployment_of(folder), ".".join(platform.python_version_tuple()[:2])))
    if manifest["id"] != wanted:
        raise RuntimeError(f"the release that was brought is {manifest['id']}, wanted is {wanted}")
    return wanted, len(manifest["files"]), manifest["total_size"]


def _release(lab: Lab, folder: Path) -> tuple[str, int, int]:
    """The patched tree as the release that the deploy will ask for: (id, files, bytes)."""
    from ddtree_ops.deploy.fitting import target

    assert lab.trees is not None
    python = ".".join(platform.python_version_tuple()[:2])
    wanted = target(deployment_of(folder), python)
    lock = load_lock(wanted.base, python)
    cache = Cache(folder / "cache" / "ddtree")
    files: dict[str, dict[str, Any]] = {}
    for base in map(Path, lab.trees.patched.split(os.pathsep)):
        for file in sorted(path for path in base.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            path = f"{site_packages(python)}/{file.relative_to(base).as_posix()}"
            if path in files:
                continue
            sha256, size = cache.add_blob([file.read_bytes()])
            files[path] = {"sha256": sha256, "size": size, "mode": 0o755 if os.access(file, os.X_OK) else 0o644}
    ninja = shutil.which("ninja")
    if ninja is not None:  # FlashInfer compiles with it; a release that `ddtree build` makes has it out of its wheel
        sha256, size = cache.add_blob([Path(ninja).read_bytes()])
        files["venv/bin/ninja"] = {"sha256": sha256, "size": size, "mode": 0o755}
    total = sum(entry["size"] for entry in files.values())
    cache.finish(
        {
            "format": FORMAT,
            "id": release_id(wanted),
            "engine": wanted.engine,
            "base": wanted.base,
            "arch": wanted.arch,
            "slim": wanted.slim,
            "requires": {**lock.requires, "driver": lock.driver, "provided": PROVIDED},
            "wheels": wanted.wheels,
            "index_requirements": [],
            "pins": [],
            "patches": load_patchset(data_dir("patches") / wanted.base).listing,
            "files": [{"path": path, **files[path]} for path in sorted(files)],
            "smoke": [f"import {module}" for module in SGLANG_SMOKE],
            "left_out": [],
            "total_size": total,
        }
    )
    return release_id(wanted), len(files), total
