"""A workspace whose only host is this machine: local transport, plain processes, the reference engine, no root.

The release is this checkout behind this interpreter, installed by hand where an upload would have put it, so that a
test needs no build; everything else is the real path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ddtree_ops.demo import local_inventory
from ddtree_ops.deploy.fitting import release_ids
from ddtree_ops.deploy.session import open_session
from ddtree_ops.engine_pair import PAIR
from ddtree_ops.model import Deployment, Workspace, load_workspace, resolve

CHECKOUT = Path(__file__).parents[3]
SERVICE = "tiny"


class Quiet:
    """A Ui that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"! {text}")

    def progress(self, label: str, done: int, total: int) -> None:
        """Nothing is drawn."""


def make_workspace(folder: Path, **profile: Any) -> Workspace:
    """The workspace; ``profile``: keys of the base besides what keeps the gate short."""
    inventories = local_inventory(folder, SERVICE, base="short", profile="ar")
    gate = {"max_new_tokens": 8, "concurrency": [1, 2], "prompts": "gate.jsonl"}
    (folder / "gate.jsonl").write_text("".join(f'{{"input_ids": [{n}, 7, 300, {n}]}}\n' for n in range(20, 30)))
    # The gate tries the context's limit at every load: most of its work at the pair's own 2,048.
    short = {"extends": "tiny", "min_accept_length": None, "context_length": 512, "exactness": gate, **profile}
    (inventories / "profiles" / "short.yaml").write_text(yaml.safe_dump(short))
    workspace = load_workspace(folder)
    for release in set(release_ids(resolve(workspace, "local")).values()):
        install(folder / "host", release)
    return workspace


def release_of(deployment: Deployment) -> str:
    """The release that its host has, of those that its base is locked for."""
    return next(iter(release_ids(deployment).values()))


def install(root: Path, release: str) -> None:
    """What an upload of the release leaves, with this checkout's code behind it."""
    home = root / "releases" / release
    (home / "venv" / "bin").mkdir(parents=True)
    python = home / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nOMP_NUM_THREADS=1 PYTHONPATH={CHECKOUT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (home / "share").mkdir()
    (home / "share" / "pair").symlink_to(PAIR)
    (home / "installed.json").write_text("{}")


@contextmanager
def workspace_in(folder: Path, **profile: Any) -> Iterator[Workspace]:
    """The workspace; at its end nothing of its host runs any more."""
    workspace = make_workspace(folder, **profile)
    try:
        yield workspace
    finally:
        for pid in processes(folder / "host"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes(root: Path) -> list[int]:
    """Every process that names the host's root in its arguments or its service in its environment."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                told = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
                if f"{root}/bin/ddtree-host".encode() in told or f"DDTREE_SERVICE={root}:".encode() in told:
                    found.append(int(path.name))
    return found


def confirmed(workspace: Workspace) -> int | None:
    """The generation on which the host stands; None where nothing is deployed."""
    with open_session(resolve(workspace, "local")) as session:
        seen = session.probe()
    assert seen.state.pending is None
    return seen.state.confirmed
