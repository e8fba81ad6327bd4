"""Real hosts with a deployed, proven, serving service each, for what only a host can show. Root; see tests/hosts.

The engine is the fault matrix' scripted one: what is timed here is never the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.deploy.session import open_session
from ddtree_ops.model import load_workspace, resolve
from ddtree_ops.remote.ship import ship
from tests.hosts.harness import Lab, TestHost, laboratory
from tests.hosts.matrix.world import PROMPTS, SCRIPTED, ScriptedRelease
from tests.hosts.test_main_job import SERVICE, Workspace

from .venvs import HOME


@dataclass(frozen=True)
class Fleet:
    """``hosts`` as the workspace ``directory`` knows them, all with nothing to change."""

    lab: Lab
    hosts: list[TestHost]
    directory: Path
    cache: Path

    def ssh_options(self, host: TestHost) -> list[str]:
        """Words for ssh(1) that hold it to the same as ddtree: no files of its own, one key, strict host keys."""
        options = ("BatchMode=yes", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes")
        options += (f"UserKnownHostsFile={host.known_hosts}", "GlobalKnownHostsFile=/dev/null")
        return ["-F", "none", "-i", str(host.identity_file), *(word for option in options for word in ("-o", option))]


@contextlib.contextmanager
def room_for_watches(least: int = 1024) -> Iterator[None]:
    """Each systemd watches files, and all hosts share this kernel's limit for root: raised while they run."""
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    before = int(limit.read_text())
    if before < least:
        limit.write_text(str(least))
    try:
        yield
    finally:
        limit.write_text(str(before))


@contextlib.contextmanager
def fleet(count: int, python: str) -> Iterator[Fleet]:
    """``count`` hosts and their workspace, for the length of the block; ``python`` has ddtree installed."""
    os.environ.setdefault("XDG_CACHE_HOME", str(HOME / "cache"))
    with (
        room_for_watches(),
        laboratory() as lab,
        tempfile.TemporaryDirectory(prefix="ddtree-speed-", dir="/var/tmp") as directory,
    ):
        hosts = [lab.host(f"h{n}") for n in range(1, count + 1)]
        folder = Path(directory, "workspace")
        folder.mkdir()
        workspace = Workspace(folder, dict.fromkeys(hosts, "root"), base="scripted")
        workspace.program = [python, "-m", "ddtree_ops.cli"]
        lines = [json.dumps({"input_ids": ids}) for ids in PROMPTS]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        workspace.profile("scripted", **SCRIPTED)
        for host in hosts:
            made = workspace.json("plan", "--host", host.name, code=3)["hosts"][0]["plan"]
            with open_session(resolve(load_workspace(folder), host.name, SERVICE, None)) as session:
                session.agent.bootstrap()
                ship(session, ScriptedRelease(made["release"]))
        workspace.ddtree("deploy", "--host", "all", "--yes", "--no-snapshot")
        workspace.ddtree("plan", "--host", "all")
        yield Fleet(lab, hosts, folder, Path(os.environ["XDG_CACHE_HOME"]))
