"""Three hosts that are this machine: two with the reference engine, one with the real sglang-router before them.

Plain processes on loopback, no root. Releases are this interpreter with what it has installed, as in sweep/place.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ddtree_ops.demo import free_port
from ddtree_ops.deploy.aftermath import Outcome
from ddtree_ops.deploy.run import deploy
from ddtree_ops.deploy.session import Options, open_session
from ddtree_ops.deploy.workers import workers_of
from ddtree_ops.model import Workspace, init_workspace, load_workspace, resolve
from ddtree_ops.sweep.load import Kept, keep
from ddtree_ops.sweep.workload import PromptSet

from ..sweep.place import Quiet, install, processes, release_of

BACKENDS = ("one", "two")
PROMPTS = PromptSet("fleet", tuple((n, 7, 300, n) for n in range(40, 56)))
CONCURRENCY, MAX_TOKENS, LIMIT_S = 3, 24, 60.0
PAUSE_S = 0.3  # a steady and light load: what is deployed meanwhile has the same cores
GATE = {"max_new_tokens": 8, "concurrency": [1], "prompts": "gate.jsonl"}


def make_fleet(folder: Path, **router: Any) -> Workspace:
    """The workspace; ``router``: keys besides the backends."""
    init_workspace(folder)
    inventories = folder / "inventories"
    for path in inventories.glob("*.yaml"):
        path.unlink()
    (folder / "gate.jsonl").write_text("".join(f'{{"input_ids": [{n}, 7, 300, {n}]}}\n' for n in range(20, 30)))
    short = {"extends": "tiny", "min_accept_length": None, "context_length": 192, "exactness": GATE}
    (inventories / "profiles" / "short.yaml").write_text(yaml.safe_dump(short))
    for name, extra in (("faulty", {"extra_args": ["--fault", "mask-all-blocked"]}), ("narrow", {"budget": 4})):
        (inventories / "profiles" / f"{name}.yaml").write_text(yaml.safe_dump({"extends": "b8k4", **extra}))
    for name in BACKENDS:
        write_host(folder, name, {"engine": {"base": "short", "profile": "ar", "port": free_port()}})
    options = {"health_interval_s": 1, "drain_timeout_s": 30, "metrics_port": free_port(), **router}
    front = {"backends": [f"{name}/engine" for name in BACKENDS], "policy": "round_robin", **options}
    write_host(folder, "front", {"door": {"port": free_port(), "router": front}})
    order = {"order": [*BACKENDS, "front"], "groups": {"engines": list(BACKENDS)}}
    (inventories / "workspace.yaml").write_text(yaml.safe_dump(order))
    return load_workspace(folder)


def write_host(folder: Path, name: str, services: dict[str, Any]) -> None:
    """An inventory file of this machine under another name, with a root of its own."""
    host = {
        "address": "127.0.0.1",
        "transport": "local",
        "supervisor": "process",
        "root": str(folder / f"host-{name}"),
        "gpus": {"count": 0, "name": "none", "arch": "none", "memory_gib": 0, "interconnect": "none"},
        "services": services,
    }
    (folder / "inventories" / f"{name}.yaml").write_text(yaml.safe_dump(host))


@contextmanager
def fleet(folder: Path, **router: Any) -> Iterator[Workspace]:
    """Deployed: both backends, the router. At its end nothing of it runs any more."""
    workspace = make_fleet(folder, **router)
    try:
        for name in workspace.hosts:
            deployment = resolve(workspace, name)
            install(folder / f"host-{name}", release_of(deployment))
            bring(workspace, name)
        yield workspace
    finally:
        for name in workspace.hosts:
            for pid in processes(folder / f"host-{name}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def bring(workspace: Workspace, name: str, profile: str | None = None, ui: Quiet | None = None) -> Outcome:
    """Deploy a host's service as ``ddtree deploy`` does. Raises what that does."""
    with open_session(resolve(workspace, name, None, profile)) as session:
        plan, seen = session.plan(Options())
        return deploy(session, plan, seen, ui or Quiet())


def door(workspace: Workspace) -> str:
    """The router's base URL, as its clients have it."""
    front = resolve(workspace, "front")
    return f"http://{front.host.address}:{front.service.port}"


def serving(workspace: Workspace) -> set[str]:
    """The hosts of the backends that the router finds healthy."""
    front = resolve(workspace, "front")
    assert front.service.router is not None and front.profile.router is not None
    hosts = dict(zip(front.profile.router.workers, front.service.router.backends, strict=True))
    with workers_of(front) as workers:
        return {hosts[one.url].host for one in workers.listed() if one.healthy}


@contextmanager
def load(workspace: Workspace) -> Iterator[Kept]:
    """Streamed requests through the router, a few in flight all the time; every one has its end when the block ends."""
    kept, over = Kept(), threading.Event()
    how: dict[str, Any] = {"max_tokens": MAX_TOKENS, "concurrency": CONCURRENCY, "limit_s": LIMIT_S, "pause_s": PAUSE_S}

    def run() -> None:
        asyncio.run(keep(door(workspace), PROMPTS, kept, over=over.is_set, **how))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(kept, len(PROMPTS.prompts))
        yield kept
        wait_for(kept, len(kept.samples) + 2 * CONCURRENCY)
    finally:
        over.set()
        thread.join(2 * LIMIT_S)
    assert not thread.is_alive()


def wait_for(kept: Kept, count: int) -> None:
    """Until so many requests were answered."""
    deadline = time.monotonic() + 2 * LIMIT_S
    while len(kept.samples) < count:
        assert time.monotonic() < deadline, (len(kept.samples), kept.failed[-3:])
        time.sleep(0.05)


def answers(kept: Kept) -> dict[int, set[tuple[int, ...]]]:
    """The different answers to each prompt: one, when every one is the target's."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for sample in kept.samples:
        found.setdefault(sample.prompt, set()).add(tuple(sample.answer.body["output_ids"]))
    return found
