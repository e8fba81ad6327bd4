"""What the exports' jobs run: ``python -m ddtree_ops.export.job exactness|bench --url URL --files DIR``.

``exactness`` is the deploy's gate against a URL; exit 0 for a pass, 4 not exact, 8 no verdict, 1 where the server never
answered. ``bench`` is one cell of a sweep. Each prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ddtree_ops import httpclients
from ddtree_ops.deploy.gate import gate_plan
from ddtree_ops.errors import DdtreeError, Failed
from ddtree_ops.exactness import load_prompts, run_gate
from ddtree_ops.export.form import EXPECT, PROFILE, PROMPTS
from ddtree_ops.model import Profile, profile_from_json
from ddtree_ops.sweep.figures import repeat_of
from ddtree_ops.sweep.grid import Load
from ddtree_ops.sweep.load import Hung, drive
from ddtree_ops.sweep.wire import RequestFailed
from ddtree_ops.sweep.workload import PromptSet, prompt_set

POLL_S = 1.0


def wait_healthy(url: str, key: str | None, limit_s: float, pid: int | None) -> None:
    """Until ``/health`` answers 200. Raises Failed after ``limit_s``, and when the process ``pid`` is gone."""
    deadline, last = time.monotonic() + limit_s, "it was not asked"
    with httpclients.blocking(url, key, timeout_s=30) as client:
        while True:
            try:
                answered = client.get("/health").status_code
                if answered == 200:
                    return
                last = f"/health answered {answered}"
            except httpx.HTTPError as error:
                last = f"/health: {error}"
            if pid is not None and not _lives(pid):
                raise Failed("the engine ended before it was healthy")
            if time.monotonic() > deadline:
                raise Failed(f"{url} is not healthy within {limit_s:g} s: {last}")
            time.sleep(POLL_S)


def exactness(profile: Profile, files: Path, url: str, key: str | None) -> tuple[int, dict[str, Any]]:
    """The gate's exit code and verdict."""
    expect = json.loads((files / EXPECT).read_text(encoding="utf-8"))
    own = files / PROMPTS
    packaged = msgspec.structs.replace(profile, exactness=msgspec.structs.replace(profile.exactness, prompts=None))
    plan = gate_plan(packaged, url, expect, None, key)
    if own.is_file():
        name = Path(profile.exactness.prompts or PROMPTS).name
        plan = dataclasses.replace(plan, prompts=load_prompts(own), prompt_set=name)
    verdict = run_gate(plan)
    return verdict.exit_code(profile.exactness.policy), verdict.to_json()


def bench(profile: Profile, url: str, key: str | None, ask: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """One pass of the sweep's client over the profile's prompt set: its figures."""
    prompts = prompt_set(None, profile)
    chosen = PromptSet(prompts.name, prompts.prompts[: ask.requests])
    load = Load(ask.concurrency, chosen.name, ask.max_tokens, ask.requests, 1)
    try:
        samples = asyncio.run(drive(url, chosen, load, limit_s=profile.exactness.time_limit_s, api_key=key))
    except (RequestFailed, Hung) as error:
        raise Failed(f"the requests were not answered: {error}") from error
    return 0, {"load": load.name, **msgspec.to_builtins(repeat_of(samples, ask.concurrency, None, closed=True))}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_ops.export.job", description=__doc__)
    parser.add_argument("what", choices=("exactness", "bench"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--files", type=Path, required=True, help="the directory with profile.json and expect.json")
    parser.add_argument("--wait-s", type=float, default=600, help="how long the server may take to be healthy")
    parser.add_argument("--pid", type=int, help="give up when this process is gone")
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    ask = parser.parse_args(argv)
    try:
        profile = profile_from_json((ask.files / PROFILE).read_text(encoding="utf-8"))
        key = ask.api_key_file.read_text(encoding="utf-8").strip() if ask.api_key_file else None
        wait_healthy(ask.url, key, ask.wait_s, ask.pid)
        if ask.what == "exactness":
            code, told = exactness(profile, ask.files, ask.url, key)
        else:
            code, told = bench(profile, ask.url, key, ask)
    except (DdtreeError, OSError) as error:
        message = error.message if isinstance(error, DdtreeError) else str(error)
        print(f"error: {message}", file=sys.stderr)
        return error.exit_code if isinstance(error, DdtreeError) else 1
    print(json.dumps({"what": ask.what, "url": ask.url, "ok": code == 0, **told}, indent=1))
    return code


def _lives(pid: int) -> bool:
    """A process that ended and that nobody has waited for is a zombie: it still takes signals."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


if __name__ == "__main__":
    sys.exit(main())
