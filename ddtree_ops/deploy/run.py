"""The client's half of a deploy and a rollback: plan, ship, let the host apply, follow, prove, tell the host.

The host decides how it ends; this module only reports what the journal says (design.md, "How a deploy goes").
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ddtree_ops.deploy.aftermath import Attended, Outcome, conclude, keep_evidence
from ddtree_ops.deploy.attend import Attendance
from ddtree_ops.deploy.drain import away
from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.fitting import fitting
from ddtree_ops.deploy.gate import preflight, prove, stored
from ddtree_ops.deploy.nodes import sealed
from ddtree_ops.deploy.plan import Plan, missing_models
from ddtree_ops.deploy.session import Session, author, bootstrap
from ddtree_ops.deploy.together import Node, Together
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Failed, Interrupted
from ddtree_ops.exactness import Verdict
from ddtree_ops.model import Profile
from ddtree_ops.release import build
from ddtree_ops.remote.ship import ship
from ddtree_ops.remote.transport import Transport


def deploy(session: Session, plan: Plan, seen: Facts, ui: Ui) -> Outcome:
    """Apply a plan that was shown: ship, apply, gate, confirm.

    Raises RolledBack (a verdict that is no pass included), NeedsHand, Locked, Failed, Interrupted.
    """
    started = time.monotonic()
    deployment = session.deployment
    if not plan.changes:
        return Outcome(plan.host, plan.service, "unchanged", plan.to, plan.release, seconds=time.monotonic() - started)
    sent = make_ready(session, plan, seen, ui)
    deployments = [one.deployment for one in session.every]
    documents = sealed(plan, deployments, txn=new_txn(), author=author(deployment.workspace_path))
    with away(session, seen, ui):
        attended = apply(session, documents, deployment.profile, ui, seen=seen)
        confirmed = conclude(session, plan, attended, ui)
    return dataclasses.replace(confirmed, bytes_sent=sent, seconds=time.monotonic() - started)


def make_ready(session: Session, plan: Plan, seen: Facts, ui: Ui) -> int:
    """All that comes before a plan is sealed, at every node: what would stop it is found, the release shipped. Bytes
    sent.

    Raises Failed, with nothing but the store and the agent changed on the host.
    """
    for one, there, found in zip(session.every, plan.every, seen.every, strict=True):
        _require_room(one, there, found)
    preflight(session.transport, session.deployment.profile, session.deployment.workspace_path)
    return sum(_send(*node, ui) for node in zip(session.every, plan.every, seen.every, strict=True))


def _require_room(session: Session, plan: Plan, seen: Facts) -> None:
    deployment = session.deployment
    require_leave(plan, seen)
    if missing := missing_models(deployment, seen):
        raise Failed(f"{plan.host}: no model at {', '.join(missing)}", hint="a deploy never downloads weights")
    require_free_port(plan.host, deployment.service.port, seen)


def _send(session: Session, plan: Plan, seen: Facts, ui: Ui) -> int:
    deployment = session.deployment
    bootstrap(session, seen, ui)
    sent = 0
    if plan.release not in seen.releases_installed:
        release = build(fitting(deployment, seen.system), progress=ui.progress)
        report = ship(session, release, lambda done, total: ui.progress("sending the release", done, total), ui.warn)
        sent = report.bytes_sent
        ui.step(f"release {release.id} installed on {plan.host} ({report.files} files, {sent} bytes sent)")
        for warning in report.warnings:
            ui.warn(warning)
    return sent


def require_leave(plan: Plan, seen: Facts) -> None:
    """Raises Failed for what the operator must say first: drift, a mask, open ports, commits that are not here."""
    if plan.exposed:
        raise Failed(
            f"{plan.host}: {plan.exposed}; nothing was changed",
            hint="a host whose systemd can enforce IPAddressDeny=; or open: in the profile, with the reason",
        )
    if seen.unit.masked and not plan.overwrite:
        raise Failed(
            f"{plan.host}: {seen.unit.path} is masked: somebody wants it never to start; nothing was changed",
            hint=f"systemctl unmask {plan.service} there, or replace the mask with --overwrite",
        )
    if plan.drift:
        keep = "keep it as a generation with --adopt" if seen.generation is None else "take it back on the host"
        raise Failed(
            f"{plan.host}: the host is not as ddtree left it: " + "; ".join(plan.drift),
            hint=f"{keep}, or replace it with --overwrite",
        )
    if plan.behind:
        raise Failed(f"{plan.host}: {plan.behind}; nothing was changed", hint="git pull first, or say --overwrite")


def require_free_port(host: str, port: int, seen: Facts) -> None:
    """Raises Failed when a process that is not the service's listens on its port: the new one could never."""
    owner = seen.port_owner
    if owner is not None and not owner.ours:
        who = f"{owner.command or 'a process'} (pid {owner.pid})" if owner.pid else "a process that root cannot name"
        raise Failed(
            f"{host}: port {port} is taken by {who}, which is not this service; nothing was changed",
            hint="stop it, or give the service another port in the inventory",
        )


def new_txn() -> str:
    """A name for a transaction: sortable by time, unique."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)


def apply(
    session: Session,
    documents: Sequence[dict[str, Any]],
    profile: Profile,
    ui: Ui,
    *,
    seen: Facts,
    gate: bool = True,
) -> Attended:
    """Hand the sealed plans to the nodes and stay with each to its terminal entry; run the gate when it is asked for.

    Without ``gate`` (a hand-made unit, no profile to prove it by) the host's own watch is all there is. Raises what
    `Attendance.run` raises; of several nodes each has its own end, and nothing is raised.
    """
    first = documents[0]

    def check(transport: Transport) -> Verdict | None:
        if not gate:
            return None
        ui.step("proving that it is exact")
        return prove(
            transport,
            profile,
            port=int(first["health"]["port"]),
            expect=first["health"]["expect"],
            workspace=session.deployment.workspace_path,
            progress=ui.progress,
        )

    def for_hosts(rank: int, verdict: Verdict | None) -> dict[str, Any]:
        if verdict is None:
            return {"kind": "UNPROVEN", "passed": True, "reasons": ["a hand-made unit has no profile to be proven by"]}
        return stored(verdict, profile, generation=documents[rank]["target"], system=seen.every[rank].system)

    if session.others:
        nodes = [Node(one, document) for one, document in zip(session.every, documents, strict=True)]
        ends, verdict = Together(nodes, ui, prove=check, for_hosts=for_hosts).run()
        every = [Attended(first["txn"], one.end, verdict, one.entries, one.error) for one in ends]
        return dataclasses.replace(every[0], others=tuple(every[1:]))
    attendance = Attendance(session, first, ui, prove=check, for_host=lambda verdict: for_hosts(0, verdict))
    try:
        end, verdict = attendance.run()
    except Interrupted as stopped:
        cut = Attended(first["txn"], {"event": "interrupted", "reason": stopped.message}, None, attendance.entries)
        keep_evidence(session.deployment, cut, ui)
        raise
    return Attended(first["txn"], end, verdict, attendance.entries)
