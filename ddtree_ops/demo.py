"""The demo: the main job on this machine with the reference engine, in a workspace of its own that is removed again.

AR, chain and DDTree 8/4 are deployed in turn through the path that ``ddtree deploy`` takes, each through the gate;
then the fault that this project exists for is deployed, and has to be refused; then the release's own engine measures
commit lengths of all six budget/topk pairs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ddtree_ops.deploy import run
from ddtree_ops.deploy.aftermath import Outcome
from ddtree_ops.deploy.session import Options, open_session
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Failed, RolledBack, UsageError
from ddtree_ops.exactness import Verdict
from ddtree_ops.model import Deployment, Workspace, init_workspace, load_workspace, resolve
from ddtree_ops.sweep.figures import repeat_of
from ddtree_ops.sweep.grid import Load
from ddtree_ops.sweep.load import Hung, drive
from ddtree_ops.sweep.records import Repeat
from ddtree_ops.sweep.wire import RequestFailed
from ddtree_ops.sweep.workload import HELD_OUT, PromptSet, held_out

SERVICE = "demo"
PROFILES = ("ar", "chain", "b8k4")
FAULT = "mask-rows-by-block-size"
MAX_NEW_TOKENS = 128
GATE_TOKENS = 32  # half of the tiny profile's, so that four gates fit into the demo
CONCURRENCY = 8
MEASURE_LIMIT_S = 600


@dataclasses.dataclass(frozen=True)
class Row:
    """One deployed profile: its gate's verdict and what was measured over HTTP; ``outputs``: token ids by prompt."""

    profile: str
    verdict: Verdict
    measured: Repeat
    outputs: list[list[int]]

    @property
    def tokens_per_step(self) -> float:
        """Mean commit length; without speculation a step is a token."""
        return self.measured.accept_length or 1.0


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """What the demo did. ``shapes`` is ``ddtree_ops.engine.measure``'s document."""

    release: str
    seconds: float
    prompts: int
    rows: tuple[Row, ...]
    refused: str
    shapes: dict[str, Any]

    def deployed(self) -> list[list[str]]:
        """Table of the deployed profiles: profile, verdict, tokens per step, answers that differ from AR's."""
        return [
            [
                row.profile,
                str(row.verdict.kind),
                f"{row.tokens_per_step:.2f}",
                f"{self._unlike(row)} of {self.prompts}",
            ]
            for row in self.rows
        ] + [[f"{PROFILES[-1]} with a planted fault", self.refused, "", ""]]

    def measured(self) -> list[list[str]]:
        """Table of the shapes: name, tokens per step, answers that differ from AR's."""
        return [
            [
                outcome["name"],
                "1.00" if outcome["commit_length"] is None else f"{outcome['commit_length']:.2f}",
                f"{outcome['rows_that_differ']} of {outcome['rows']}",
            ]
            for outcome in self.shapes["outcomes"]
        ]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: outputs left out."""
        rows = [
            {
                "profile": row.profile,
                "verdict": row.verdict.to_json(),
                "tokens_per_step": row.tokens_per_step,
                "tokens": row.measured.tokens,
                "seconds": row.measured.seconds,
                "differ_from_ar": self._unlike(row),
            }
            for row in self.rows
        ]
        return {
            "release": self.release,
            "seconds": self.seconds,
            "prompts": self.prompts,
            "deployed": rows,
            "planted_fault": {"fault": FAULT, "result": self.refused},
            "shapes": self.shapes,
        }

    def _unlike(self, row: Row) -> int:
        return sum(a != b for a, b in zip(row.outputs, self.rows[0].outputs, strict=True))


def run_demo(ui: Ui, prompts: int) -> DemoReport:
    """Do it all and take it down again. Raises Failed when anything is not as it must be, whatever the gate said."""
    started = time.monotonic()
    chosen = PromptSet(HELD_OUT, held_out(looping=False)[:prompts])
    if len(chosen.prompts) < prompts:
        raise UsageError(f"--prompts {prompts}", hint=f"the pair has {len(chosen.prompts)} that do not loop")
    rows: list[Row] = []
    release = ""
    with tempfile.TemporaryDirectory(prefix="ddtree-demo-") as scratch, _workspace(Path(scratch)) as workspace:
        for profile in PROFILES:
            outcome, measured, outputs = _deploy(resolve(workspace, "local", SERVICE, profile), chosen, ui)
            if outcome.verdict is None or outcome.release is None:
                raise Failed(f"{profile}: the deploy ended without a verdict")
            release = outcome.release
            rows.append(Row(profile, outcome.verdict, measured, outputs))
            if outputs != rows[0].outputs:
                raise Failed(f"{profile}: answers differ from AR's, and the gate said {outcome.verdict.kind}")
        refused = _refuse_fault(resolve(workspace, "local", SERVICE, "faulty"), ui)
        shapes = _shapes(resolve(workspace, "local", SERVICE, PROFILES[-1]), release, chosen, Path(scratch), ui)
    return DemoReport(release, time.monotonic() - started, prompts, tuple(rows), refused, shapes)


def _deploy(deployment: Deployment, prompts: PromptSet, ui: Ui) -> tuple[Outcome, Repeat, list[list[int]]]:
    ui.step(f"-- {deployment.profile.name} --")
    with open_session(deployment) as session:
        plan, seen = session.plan(Options())
        outcome = run.deploy(session, plan, seen, ui)
        with session.transport.forward(deployment.service.port) as url:
            return outcome, *_measure(url, prompts)


def _measure(url: str, prompts: PromptSet) -> tuple[Repeat, list[list[int]]]:
    """Every prompt once, by the sweep's client: the figures and the token ids by prompt."""
    load = Load(CONCURRENCY, prompts.name, MAX_NEW_TOKENS, len(prompts.prompts), 1)
    try:
        samples = asyncio.run(drive(url, prompts, load, limit_s=MEASURE_LIMIT_S))
    except (RequestFailed, Hung) as error:
        raise Failed(f"the demo's requests were not answered: {error}") from error
    samples.sort(key=lambda sample: sample.prompt)
    return repeat_of(samples, CONCURRENCY, None, closed=True), [one.answer.body["output_ids"] for one in samples]


def _refuse_fault(deployment: Deployment, ui: Ui) -> str:
    """Deploy the planted fault; it must be refused and rolled back. Returns how it ended, in words."""
    ui.step(f"-- {PROFILES[-1]} with {FAULT}: has to be refused --")
    with open_session(deployment) as session:
        plan, seen = session.plan(Options())
        try:
            run.deploy(session, plan, seen, ui)
        except RolledBack as error:
            after = session.probe()
            if after.state.confirmed != seen.state.confirmed or after.active.state != "active":
                raise Failed("the fault was refused, but what ran before is not back") from error
            return "refused, rolled back"
    raise Failed(f"an engine with {FAULT} passed the gate")


def _shapes(deployment: Deployment, release: str, prompts: PromptSet, scratch: Path, ui: Ui) -> dict[str, Any]:
    """Commit lengths of AR, chain and the six pairs, by the engine that the release holds."""
    ui.step("-- commit length of every shape, by the release's own engine --")
    file = scratch / "prompts.json"
    file.write_text(json.dumps([{"prompt_ids": ids, "loops": False} for ids in prompts.prompts]))
    home = f"{deployment.host.root}/releases/{release}"
    argv = [f"{home}/venv/bin/python", "-m", "ddtree_ops.engine.measure", "--pair", f"{home}/share/pair", "--json"]
    argv += ["--prompts", str(file), "--concurrency", str(CONCURRENCY), "--max-new-tokens", str(MAX_NEW_TOKENS)]
    with open_session(deployment) as session:
        session.agent.call("stop")
        done = session.transport.run(argv, timeout=MEASURE_LIMIT_S)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        document = {}
    if done.code or not document:
        raise Failed("the release's engine could not measure", hint=done.stderr.decode(errors="replace")[-2000:])
    return document


def local_inventory(folder: Path, service: str, **entry: str) -> Path:
    """Make a workspace whose only host, ``local``, is this machine with plain processes; its ``inventories``.

    ``entry``: the service's, such as ``base`` and ``profile``, to which a free port is added.
    """
    init_workspace(folder)
    inventories = folder / "inventories"
    for path in inventories.glob("*.yaml"):
        path.unlink()
    local = {
        "address": "127.0.0.1",
        "transport": "local",
        "supervisor": "process",
        "root": str(folder / "host"),
        "gpus": {"count": 0, "name": "none", "arch": "none", "memory_gib": 0, "interconnect": "none"},
        "services": {service: {**entry, "port": free_port()}},
    }
    (inventories / "local.yaml").write_text(yaml.safe_dump(local))
    return inventories


@contextmanager
def _workspace(scratch: Path) -> Iterator[Workspace]:
    """A workspace whose only host is this machine, under ``scratch``; its service is stopped at the end."""
    inventories = local_inventory(scratch, SERVICE, base="demo", profile=PROFILES[-1])
    short = {"extends": "tiny", "exactness": {"max_new_tokens": GATE_TOKENS}}
    (inventories / "profiles" / "demo.yaml").write_text(yaml.safe_dump(short))
    faulty = {"extends": PROFILES[-1], "extra_args": ["--fault", FAULT]}
    (inventories / "profiles" / "faulty.yaml").write_text(yaml.safe_dump(faulty))
    workspace = load_workspace(scratch)
    try:
        yield workspace
    finally:
        if (scratch / "host" / "bin").exists():
            with open_session(resolve(workspace, "local", SERVICE, PROFILES[-1])) as session:
                session.agent.call("stop")
        _make_writable(scratch)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _make_writable(top: Path) -> None:
    """Releases are read-only on purpose; the demo's own is about to be removed."""
    for directory, _, _ in os.walk(top):
        Path(directory).chmod(0o700)
