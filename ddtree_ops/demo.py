"""The demo: the main job on this machine with the reference engine, in a workspace of its own that is removed again."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ddtree_ops import engine_pair
from ddtree_ops.bench import Cell, load_held_out, measure
from ddtree_ops.deploy import run
from ddtree_ops.errors import Failed
from ddtree_ops.exactness import Verdict
from ddtree_ops.model import Workspace, load_workspace, resolve
from ddtree_ops.model.init import init_workspace

SERVICE = "demo"
DEPLOYED = "b8k4"
PROFILES = ("ar", "chain", "b8k4", "b16k4", "b16k8", "b24k6", "b32k8", "b48k8")
MAX_NEW_TOKENS = 128
CONCURRENCY = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """One deployed profile: its gate's verdict, what was measured, and how many answers differ from AR's."""

    profile: str
    verdict: Verdict
    cell: Cell
    differ: int


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """What the demo did, for the table and ``--json``."""

    release: str
    seconds: float
    prompts: int
    results: tuple[Row, ...]

    def headline(self) -> list[str]:
        """Two lines: what was deployed and how it ended."""
        same = sum(row.differ == 0 for row in self.results)
        return [
            f"deployed: the reference engine, release {self.release}, with {len(self.results)} profiles in turn",
            f"exact: {same} of {len(self.results)} give AR's very tokens"
            f" on {self.prompts} held-out prompts x {MAX_NEW_TOKENS} tokens",
        ]

    def columns(self) -> list[str]:
        """Of the table."""
        return ["profile", "verdict", "tokens/step", "x AR", "answers unlike AR's", "tok/s here"]

    def rows(self) -> list[list[str]]:
        """Of the table: one a profile."""
        base = self.results[0].cell.tokens_per_second
        return [
            [
                row.profile,
                row.verdict.kind,
                f"{row.cell.tokens_per_step:.2f}",
                f"{row.cell.tokens_per_second / base:.2f}",
                f"{row.differ} of {self.prompts}",
                f"{row.cell.tokens_per_second:.0f}",
            ]
            for row in self.results
        ]

    def caption(self) -> str:
        """How to read it."""
        return (
            f"C={CONCURRENCY}, fp32, greedy, prompts that do not loop; {self.seconds:.0f} s in all. Tokens per step is "
            "what a GPU turns into speed; a CPU pays for every row of a wide verify, so tok/s here says nothing of one."
        )

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: outputs left out."""
        rows = [
            {
                "profile": row.profile,
                "verdict": row.verdict.kind,
                "tokens_per_step": row.cell.tokens_per_step,
                "tokens": row.cell.tokens,
                "steps": row.cell.steps,
                "seconds": row.cell.seconds,
                "differ_from_ar": row.differ,
            }
            for row in self.results
        ]
        return {"release": self.release, "prompts": self.prompts, "concurrency": CONCURRENCY, "cells": rows}


def run_demo(ui: run.Ui, prompts: int) -> DemoReport:
    """Deploy every profile in turn through the path that ``ddtree deploy`` takes, measure each, take it all down.

    Raises Failed when the host gives an answer unlike AR's, whatever the gate said.
    """
    started = time.monotonic()
    held_out = load_held_out(engine_pair.HELD_OUT, count=prompts)
    rows: list[Row] = []
    release = ""
    with tempfile.TemporaryDirectory(prefix="ddtree-demo-") as scratch, _workspace(Path(scratch)) as workspace:
        for profile in PROFILES:
            deployment = resolve(workspace, "local", SERVICE, profile)
            session = run.open_session(deployment)
            with session.transport:
                ui.step(f"-- {profile} --")
                options = run.Options()
                plan, seen = session.plan(options)
                outcome = run.deploy(session, plan, seen, options, ui)
                if outcome.verdict is None or outcome.release is None:
                    raise Failed(f"{profile}: the deploy ended without a verdict")
                release = outcome.release
                with session.transport.forward(deployment.service.port) as url:
                    cell = measure(
                        url, [p.ids for p in held_out], concurrency=CONCURRENCY, max_new_tokens=MAX_NEW_TOKENS
                    )
            reference = rows[0].cell.outputs if rows else cell.outputs
            differ = sum(a != b for a, b in zip(cell.outputs, reference, strict=True))
            rows.append(Row(profile, outcome.verdict, cell, differ))
            if differ:
                raise Failed(
                    f"{profile}: {differ} of {prompts} answers are not AR's, and the gate said {outcome.verdict.kind}"
                )
    return DemoReport(release, time.monotonic() - started, prompts, tuple(rows))


@contextmanager
def _workspace(scratch: Path) -> Iterator[Workspace]:
    """A workspace whose only host is this machine, under ``scratch``; its service is stopped at the end."""
    init_workspace(scratch)
    for path in (scratch / "inventories").glob("*.yaml"):
        path.unlink()
    local = {
        "address": "127.0.0.1",
        "transport": "local",
        "supervisor": "process",
        "root": str(scratch / "host"),
        "gpus": {"count": 0, "name": "none", "arch": "none", "memory_gib": 0, "interconnect": "none"},
        "services": {SERVICE: {"base": "tiny", "profile": DEPLOYED, "port": _free_port()}},
    }
    (scratch / "inventories" / "local.yaml").write_text(yaml.safe_dump(local))
    workspace = load_workspace(scratch)
    try:
        yield workspace
    finally:
        session = run.open_session(resolve(workspace, "local", SERVICE, DEPLOYED))
        with session.transport:
            session.agent.call("stop")
        _make_writable(scratch)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _make_writable(top: Path) -> None:
    """Releases are read-only on purpose; the demo's own is about to be removed."""
    for directory, _, _ in os.walk(top):
        Path(directory).chmod(0o700)
