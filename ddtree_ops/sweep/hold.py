"""One start of the service with a shape's arguments: deployed as any deploy is, gated, measured, and never confirmed.

The host's transaction stays open while cells are measured: the client renews its lease, and whatever ends it (the
verdict left here, a lost client, the host's own deadline) puts back what ran before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.deploy import run as deploying
from ddtree_ops.deploy.attend import Attendance, Prove
from ddtree_ops.deploy.drain import away
from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.follow import Entry
from ddtree_ops.deploy.gate import api_key, prove
from ddtree_ops.deploy.nodes import planned, sealed
from ddtree_ops.deploy.plan import Plan
from ddtree_ops.deploy.session import Options, Session, author
from ddtree_ops.deploy.together import Node, Together
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Failed, NeedsHand
from ddtree_ops.exactness import Verdict
from ddtree_ops.model import Deployment
from ddtree_ops.remote.transport import Transport
from ddtree_ops.sweep import server
from ddtree_ops.sweep.cell import measure_cell
from ddtree_ops.sweep.grid import Cell, Start
from ddtree_ops.sweep.load import Hung
from ddtree_ops.sweep.profiles import rules_of
from ddtree_ops.sweep.records import Attempt, Ended, Journal, Measured, Started, Status
from ddtree_ops.sweep.wire import RequestFailed
from ddtree_ops.sweep.workload import PromptSet

#: The host's words for an end that says nothing of the server: a link that was lost, or somebody's unlock.
ENDED_FROM_OUTSIDE = re.compile("client was away|told to stop")
MEANT = "a sweep's start is never confirmed"
NEVER_KEPT = {
    "kind": "INCONCLUSIVE",
    "passed": False,
    "reasons": [{"effect": "inconclusive", "code": "sweep", "message": MEANT}],
}
#: What a cell may take beside its passes: probes, GPU queries, the journal.
CELL_EXTRA_S = 120.0


@dataclass(frozen=True)
class Rules:
    """What holds for every start: the prompt sets, how long one pass may take, and when no further cell begins
    (time.monotonic; None: never).
    """

    sets: Mapping[str, PromptSet]
    pass_limit_s: float
    stop_at: float | None = None
    begun: Callable[[Cell], None] = lambda cell: None
    done: Callable[[Measured], None] = lambda record: None

    @property
    def over(self) -> bool:
        """Whether the time for beginning cells is over."""
        return self.stop_at is not None and time.monotonic() >= self.stop_at


class _Calm:
    """A Ui for which the end that was meant is no warning."""

    def __init__(self, ui: Ui) -> None:
        self.step, self.progress, self._warn = ui.step, ui.progress, ui.warn

    def warn(self, text: str) -> None:
        if MEANT not in text:
            self._warn(text)


@dataclass
class Hold:
    """One start on its way. `run` returns when the host is back where it was."""

    session: Session
    start: Start
    journal: Journal
    rules: Rules
    ui: Ui
    txn: str = ""
    _verdict: Verdict | None = None
    _broken: tuple[Cell, float, Exception, bool] | None = None
    _left: list[Cell] = field(default_factory=list)

    def run(self) -> None:
        """Deploy, gate, measure, go back. Every cell that could be ended has a record then.

        Raises what a deploy raises before it changes anything, Unreachable, Interrupted, and NeedsHand where the host
        could not go back. A start that fails is no error: its cells say so.
        """
        plan, seen = planned(self.session, Options())
        deployment = self.session.deployment
        deploying.make_ready(self.session, plan, seen, self.ui)
        self.txn = deploying.new_txn()
        there = [one.deployment for one in self.session.every]
        documents = sealed(plan, there, txn=self.txn, author=author(deployment.workspace_path))
        for document in documents:
            document["gate_timeout_s"] += self._work_s()
        self.journal.append(
            Attempt(
                t=time.time(),
                txn=self.txn,
                shape=self.start.shape,
                number=self.start.number,
                back_to=plan.from_,
            )
        )
        self._left = list(self.start.cells)
        began = time.monotonic()

        def check(transport: Transport) -> Verdict:
            return self._check(transport, plan, seen, documents[0], began)

        with away(self.session, seen, self.ui):
            began = time.monotonic()
            end = self._attend(documents, check)
            self._finish(end, time.monotonic() - began)

    def _attend(self, documents: list[dict[str, Any]], check: Prove) -> Entry:
        """The journal's last word, of several nodes rank 0's. Raises NeedsHand where another one could not go back."""
        if not self.session.others:
            return Attendance(
                self.session, documents[0], _Calm(self.ui), prove=check, for_host=lambda _: NEVER_KEPT
            ).run()[0]
        nodes = [Node(one, document) for one, document in zip(self.session.every, documents, strict=True)]
        ends, _ = Together(nodes, _Calm(self.ui), prove=check, for_hosts=lambda rank, verdict: NEVER_KEPT).run()
        if ends[0].error is not None:
            raise ends[0].error
        for node, one in zip(nodes[1:], ends[1:], strict=True):
            if one.end.get("event") not in ("recovered", "unchanged"):
                why = one.error.message if one.error is not None else one.end.get("reason")
                raise NeedsHand(
                    f"{node.name}: the host could not go back: {why}", hint=f"ddtree status --host {node.name}"
                )
        return ends[0].end

    def _work_s(self) -> float:
        """How long measuring may take before the host ends it by itself."""
        passes = sum(cell.load.repeats + 5 for cell in self.start.cells)
        return min(passes * self.rules.pass_limit_s + len(self.start.cells) * CELL_EXTRA_S, 900_000.0)

    def _check(self, transport: Transport, plan: Plan, seen: Facts, sealed: dict[str, Any], began: float) -> Verdict:
        """Gate and measure; called again after a lost link, and goes on with what is left then."""
        deployment = self.session.deployment
        if self._verdict is None:
            load_s = time.monotonic() - began
            self.ui.step("proving that it is exact")
            self._verdict = prove(
                transport,
                deployment.profile,
                port=int(sealed["health"]["port"]),
                expect=sealed["health"]["expect"],
                workspace=deployment.workspace_path,
                progress=self.ui.progress,
            )
            with transport.forward(deployment.service.port) as url:
                self._started(transport, url, plan, seen, load_s)
        if self._verdict.passed(deployment.profile.exactness.policy):
            with transport.forward(deployment.service.port) as url:
                self._measure(transport, url, plan)
        return self._verdict

    def _started(self, transport: Transport, url: str, plan: Plan, seen: Facts, load_s: float) -> None:
        deployment, verdict = self.session.deployment, self._verdict
        assert verdict is not None
        info: dict[str, Any] = {}
        with contextlib.suppress(Failed):
            info = server.server_info(url, api_key(transport, deployment.profile))
        self.journal.append(
            Started(
                t=time.time(),
                txn=self.txn,
                shape=self.start.shape,
                number=self.start.number,
                release=plan.release,
                profile=dict(plan.meta["profile"]),
                rules=rules_of(deployment),
                arguments=server.arguments(info),
                identity=identity(deployment, plan, seen),
                verdict=verdict.to_json(),
                passed=verdict.passed(deployment.profile.exactness.policy),
                load_s=round(load_s, 3),
            )
        )

    def _measure(self, transport: Transport, url: str, plan: Plan) -> None:
        """The cells left, until one breaks or the time is over."""
        deployment = self.session.deployment
        key = api_key(transport, deployment.profile)
        info = server.server_info(url, key)
        eos = server.model_eos(transport, deployment, plan.release)
        while self._left and not self.rules.over:
            cell = self._left[0]
            self.rules.begun(cell)
            prompts = self.rules.sets[cell.load.prompts]
            why = server.too_small(info, cell.load.concurrency) or server.too_long(info, prompts, cell.load.max_tokens)
            if why is not None:
                self._record(Measured(t=time.time(), cell=cell, status="refused", reason=why, txn=self.txn))
                continue
            began, before = time.monotonic(), server.gpus(transport, deployment)
            try:
                figures = measure_cell(
                    url,
                    cell.load,
                    prompts,
                    eos=eos,
                    pass_limit_s=self.rules.pass_limit_s,
                    api_key=key,
                    tell=self._tell,
                )
            except (RequestFailed, Hung) as error:
                # Whether the link or the server broke is asked of the link: Unreachable is handled one level up.
                transport.run(["true"], timeout=15)
                starved = server.says_out_of_memory(server.log_tail(self.session.agent.call))
                self._broken = (cell, began, error, starved)
                return
            self._record(
                Measured(
                    t=time.time(),
                    cell=cell,
                    status="ok",
                    txn=self.txn,
                    repeats=figures.repeats,
                    warmup=figures.warmup,
                    steady=figures.steady,
                    gpus_before=before,
                    gpus_after=server.gpus(transport, deployment),
                    wall_s=round(time.monotonic() - began, 3),
                )
            )

    def _tell(self, what: str, done: int, total: int) -> None:
        self.ui.progress(f"{self._left[0].name}: {what}", done, total)

    def _record(self, record: Measured) -> None:
        self.journal.append(record)
        self._left.remove(record.cell)
        self.rules.done(record)

    def _finish(self, end: Entry, seconds: float) -> None:
        """After the journal's last word: what it says of the cells that have no record yet."""
        event, reason = str(end.get("event")), str(end.get("reason") or "no reason given")
        down = end.get("downtime_s")
        self.journal.append(
            Ended(
                t=time.time(),
                txn=self.txn,
                event=event,
                generation=end.get("generation"),
                seconds=round(seconds, 3),
                downtime_s=down if isinstance(down, float) else None,
            )
        )
        host = self.session.deployment.host.name
        if event not in ("recovered", "unchanged"):
            commands = [str(line) for line in end.get("commands") or [f"ddtree recover --host {host}"]]
            raise NeedsHand(f"{host}: the host could not go back: {reason}", hint="\n".join(commands))
        log = [str(line) for line in end.get("log") or []]
        if self._broken is not None:
            self._record(broken(self._broken, log, self.txn))
        elif self._verdict is None:
            status: Status = "out-of-memory" if server.says_out_of_memory([*log, reason]) else "start-failed"
            self._all(status, reason)
        elif not self._verdict.passed(self.session.deployment.profile.exactness.policy):
            why = "; ".join(one.message for one in self._verdict.reasons if one.effect != "note")
            tokens = f"{self._verdict.counts.findings} tokens are not the target model's"
            self._all("not-exact", f"{self._verdict.kind}: {why or tokens}")
        elif self._left and not self.rules.over and not ENDED_FROM_OUTSIDE.search(reason):
            # The server went between two cells, or something else of the start: its next cell pays for it.
            cell = self._left[0]
            self._record(Measured(t=time.time(), cell=cell, status="failed", reason=reason[:1000], txn=self.txn))

    def _all(self, status: Status, reason: str) -> None:
        for cell in list(self._left):
            self._record(Measured(t=time.time(), cell=cell, status=status, reason=reason[:1000], txn=self.txn))


def broken(found: tuple[Cell, float, Exception, bool], log: list[str], txn: str) -> Measured:
    """The record of a cell whose server did not answer: it died, ran out of memory, or hangs."""
    cell, began, error, starved = found
    status: Status = "hang" if isinstance(error, Hung) else "failed"
    if starved or server.says_out_of_memory(log):
        status = "out-of-memory"
    elif "connection" in str(error):
        status = "crash"
    wall = round(time.monotonic() - began, 3)
    return Measured(t=time.time(), cell=cell, status=status, reason=str(error)[:1000], txn=txn, wall_s=wall)


def identity(deployment: Deployment, plan: Plan, seen: Facts) -> dict[str, Any]:
    """What two cells must have in common to stand in one table, the shape and the load apart."""
    profile, cards = deployment.profile, deployment.host.gpus
    models = plan.meta.get("models") or {}
    return {
        "engine": profile.engine,
        "release": plan.release,
        "model": profile.model,
        "weights": _weights(models, profile.model),
        "drafter": None if profile.drafter is None else _weights(models, profile.drafter),
        "dtype": profile.dtype,
        "tp": profile.tp,
        "pp": profile.pp,
        "ep": profile.ep,
        "gpus": f"{cards.count}x {cards.name} ({cards.arch}, {cards.interconnect})" if cards.count else "none",
        "driver": seen.system.driver,
        "machine": f"{seen.system.hostname} {seen.system.machine}",
    }


def _weights(models: Mapping[str, Any], path: str) -> str:
    """A hash of what the plan knows of a model; of its path where it lies in the release, which tells the rest."""
    told = json.dumps(models.get(path) or path, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]
