"""The client's half of a deploy and a rollback: plan, ship, let the host apply, follow, prove, tell the host.

The host decides how it ends; this module only reports what the journal says (design.md, "How a deploy goes").
"""

from __future__ import annotations

import base64
import dataclasses
import getpass
import secrets
import socket
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from ddtree_ops import host as host_side
from ddtree_ops.deploy.attend import Attendance, Ui
from ddtree_ops.deploy.facts import Facts, System, facts
from ddtree_ops.deploy.fitting import fitting, release_ids
from ddtree_ops.deploy.follow import Entry
from ddtree_ops.deploy.gate import preflight, prove, stored
from ddtree_ops.deploy.plan import (
    LEASE_S,
    UNIT_DIR,
    Plan,
    expected,
    find_drift,
    make_plan,
    missing_models,
    model_paths,
    seal,
)
from ddtree_ops.errors import DdtreeError, Failed, Locked, NeedsHand, RolledBack
from ddtree_ops.exactness import Verdict
from ddtree_ops.model import Deployment, Profile, profile_from_json
from ddtree_ops.release import build
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.ship import ship
from ddtree_ops.remote.transport import Transport, connect


@dataclasses.dataclass(frozen=True)
class Options:
    """What the operator allowed beyond the plain case."""

    adopt: bool = False
    overwrite: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a deploy or rollback ended well. ``result`` is ``unchanged`` or ``confirmed``."""

    host: str
    service: str
    result: str
    generation: int | None
    release: str | None
    verdict: Verdict | None = None
    downtime_s: float | None = None
    bytes_sent: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**plain, "verdict": self.verdict.to_json() if self.verdict else None}


class Session:
    """One host's service, connected: the transport and the agent."""

    def __init__(self, deployment: Deployment, transport: Transport) -> None:
        self.deployment = deployment
        self._use(transport)

    def _use(self, transport: Transport) -> None:
        host = self.deployment.host
        self.transport = transport
        self.agent = Agent(
            transport,
            root=host.root,
            service=self.deployment.service_name,
            supervisor=host.supervisor,
            unit_dir=UNIT_DIR,
        )

    def reconnect(self) -> None:
        """Dial again in place of a link that is lost. Raises Unreachable."""
        self.transport.close()
        self._use(connect(self.deployment.host))

    def beside(self) -> Transport:
        """One more connection to the host, for the caller to close. Raises Unreachable."""
        return connect(self.deployment.host)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.transport.close()

    def probe(self, releases: Collection[str] = ()) -> Facts:
        """One round trip, no write. ``releases``: ids to ask for."""
        reply = self.agent.call(
            "probe",
            model_paths=model_paths(self.deployment),
            releases=sorted(releases),
            port=self.deployment.service.port,
        )
        return facts(reply)

    def plan(self, options: Options) -> tuple[Plan, Facts]:
        """Probe and compare; touches nothing. Raises Failed for a host that no release of the profile's base fits."""
        ids = release_ids(self.deployment)
        seen = self.probe(ids.values())
        wanted = ids[fitting(self.deployment, seen.system).python]
        plan = make_plan(
            self.deployment,
            wanted,
            seen,
            adopt=options.adopt,
            overwrite=options.overwrite,
            author=author(self.deployment.workspace_path),
        )
        return plan, seen


def open_session(deployment: Deployment) -> Session:
    """Connect to the deployment's host; leaving the session's block closes the connection."""
    return Session(deployment, connect(deployment.host))


def author(workspace: Path) -> dict[str, Any]:
    """Who deploys from where: recorded in the generation, never compared."""
    commit = subprocess.run(
        ["git", "-C", str(workspace), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "who": getpass.getuser(),
        "client": socket.gethostname(),
        "workspace_commit": commit.stdout.strip() or None,
        "created": time.time(),
    }


def settle(session: Session, seen: Facts, ui: Ui) -> bool:
    """Before a change: resolve an unfinished deploy. True when something was recovered and the probe is stale.

    Raises Locked when somebody's deploy is alive.
    """
    if seen.lock is not None and seen.lock.alive:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.lock.since))
        raise Locked(
            f"{session.deployment.host.name}: {session.deployment.service_name} is being deployed by "
            f"{seen.lock.who or 'somebody'} since {since} (txn {seen.lock.txn})",
            hint="wait for it, or end it with: ddtree unlock --reason '...'",
        )
    if seen.unfinished is None and seen.state.pending is None:
        return False
    ui.step(f"an earlier deploy ({seen.unfinished}) did not finish; recovering it first")
    session.agent.call(
        "recover", reason="a later deploy found it unfinished", timeout=restore_limit_s(session.deployment)
    )
    return True


def restore_limit_s(deployment: Deployment) -> float:
    """How long a restore may take, in seconds: stop what is there, load what was there before."""
    return deployment.profile.stop_timeout_s + deployment.profile.load_timeout_s + LEASE_S


def deploy(session: Session, plan: Plan, seen: Facts, options: Options, ui: Ui) -> Outcome:
    """Apply a plan that was shown: ship, apply, gate, confirm.

    Raises RolledBack (a verdict that is no pass included), NeedsHand, Locked, Failed, Interrupted.
    """
    started = time.monotonic()
    deployment = session.deployment
    if not plan.changes:
        return Outcome(plan.host, plan.service, "unchanged", plan.to, plan.release, seconds=time.monotonic() - started)
    if seen.unit.masked and not options.overwrite:
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
    if missing := missing_models(deployment, seen):
        raise Failed(f"{plan.host}: no model at {', '.join(missing)}", hint="a deploy never downloads weights")
    require_free_port(plan.host, deployment.service.port, seen)
    preflight(session.transport, deployment.profile, deployment.workspace_path)
    bootstrap(session, seen, ui)
    sent = 0
    if plan.release not in seen.releases_installed:
        release = build(fitting(deployment, seen.system), progress=ui.progress)
        report = ship(session, release, lambda done, total: ui.progress("sending the release", done, total), ui.warn)
        sent = report.bytes_sent
        ui.step(f"release {release.id} installed on {plan.host} ({report.files} files, {sent} bytes sent)")
        for warning in report.warnings:
            ui.warn(warning)
    sealed = seal(
        plan,
        deployment,
        txn=new_txn(),
        author=author(deployment.workspace_path),
        adopt=plan.adopts,
        overwrite=options.overwrite,
    )
    end, verdict = apply(session, sealed, deployment.profile, ui, system=seen.system)
    return conclude(plan, end, verdict, sent, time.monotonic() - started)


def rollback(session: Session, seen: Facts, to: int | None, ui: Ui) -> Outcome:
    """Back to generation ``to`` (default: the newest proven one before the current), through the same gate."""
    started = time.monotonic()
    deployment = session.deployment
    history = session.agent.call("history", limit=200)
    try:
        target = choose_rollback(seen, history.get("generations", []), to)
    except Failed as error:
        raise Failed(f"{deployment.host.name}: {error.message}", hint=error.hint) from None
    stored = session.agent.call("generation", n=target)
    meta = stored["meta"]
    adopted = meta.get("adopted") is not None
    if adopted:
        ui.warn(f"generation {target} is a hand-made unit: started and watched, but there is no profile to prove it by")
    else:
        deployment = msgspec.structs.replace(deployment, profile=profile_from_json(stored["files"]["profile.json"]))
        preflight(session.transport, deployment.profile, deployment.workspace_path)
    profile = deployment.profile
    for line in find_drift(seen, deployment.host.supervisor):
        ui.warn(f"drift, replaced by the rollback: {line}")
    plan = Plan(
        host=deployment.host.name,
        service=deployment.service_name,
        action="rollback",
        from_=seen.state.confirmed,
        to=target,
        release=meta.get("release"),
        meta={
            "health": meta.get("health")
            or {"port": deployment.service.port, "timeout_s": profile.load_timeout_s, "expect": {}, "fatal": []}
        },
        expect=expected(seen),
    )
    bootstrap(session, seen, ui)
    sealed = seal(
        plan, deployment, txn=new_txn(), author=author(deployment.workspace_path), adopt=False, overwrite=True
    )
    end, verdict = apply(session, sealed, profile, ui, system=seen.system, gate=not adopted)
    return conclude(plan, end, verdict, 0, time.monotonic() - started)


def choose_rollback(seen: Facts, generations: list[dict[str, Any]], to: int | None) -> int:
    """The generation to go back to: the named one, else the newest earlier one that was ever confirmed.

    Raises Failed when there is none or the named one does not exist.
    """
    current = seen.state.confirmed
    known = {int(g["n"]): g for g in generations}
    if to is not None:
        if to not in known:
            raise Failed(f"there is no generation {to}", hint="see: ddtree history")
        if to == current:
            raise Failed(f"generation {to} is what runs now")
        return to
    earlier = [n for n, g in known.items() if n != current and g.get("confirmed") and (current is None or n < current)]
    if not earlier:
        raise Failed("there is no earlier proven generation to go back to", hint="see: ddtree history")
    return max(earlier)


def require_free_port(host: str, port: int, seen: Facts) -> None:
    """Raises Failed when a process that is not the service's listens on its port: the new one could never."""
    owner = seen.port_owner
    if owner is not None and not owner.ours:
        who = f"{owner.command or 'a process'} (pid {owner.pid})" if owner.pid else "a process that root cannot name"
        raise Failed(
            f"{host}: port {port} is taken by {who}, which is not this service; nothing was changed",
            hint="stop it, or give the service another port in the inventory",
        )


def bootstrap(session: Session, seen: Facts, ui: Ui) -> None:
    """Install or refresh ``bin/ddtree-host`` when the host has another one."""
    if seen.agent_sha256 == host_side.sha256():
        return
    ui.step("installing ddtree-host")
    session.agent.call("bootstrap", source_b64=base64.b64encode(host_side.source().encode()).decode())


def new_txn() -> str:
    """A name for a transaction: sortable by time, unique."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)


def apply(
    session: Session, sealed: dict[str, Any], profile: Profile, ui: Ui, *, system: System, gate: bool = True
) -> tuple[Entry, Verdict | None]:
    """Hand the sealed plan to the host and stay with it to its terminal entry; run the gate when it asks for it.

    Without ``gate`` (a hand-made unit, no profile to prove it by) the host's own watch is all there is. Raises what
    `Attendance.run` raises.
    """

    def check(transport: Transport) -> Verdict | None:
        if not gate:
            return None
        ui.step("proving that it is exact")
        return prove(
            transport,
            profile,
            port=int(sealed["health"]["port"]),
            expect=sealed["health"]["expect"],
            workspace=session.deployment.workspace_path,
            progress=ui.progress,
        )

    def for_host(verdict: Verdict | None) -> dict[str, Any]:
        if verdict is None:
            return {"kind": "UNPROVEN", "passed": True, "reasons": ["a hand-made unit has no profile to be proven by"]}
        return stored(verdict, profile, generation=sealed["target"], system=system)

    return Attendance(session, sealed, ui, prove=check, for_host=for_host).run()


def conclude(plan: Plan, end: Entry, verdict: Verdict | None, sent: int, seconds: float) -> Outcome:
    """Turn the journal's last word into an outcome or the error with the right exit code."""
    event, reason = end.get("event"), end.get("reason") or "no reason given"
    if event == "confirmed":
        return Outcome(
            plan.host, plan.service, "confirmed", plan.to, plan.release, verdict, end.get("downtime_s"), sent, seconds
        )
    log = "\n".join(str(line) for line in (end.get("log") or [])[-10:])
    if event == "recovered":
        back = f"generation {end.get('generation')}" if end.get("generation") is not None else "nothing deployed"
        error: DdtreeError = RolledBack(f"{plan.host}: {reason}; rolled back to {back}", hint=log)
        if verdict is not None:
            error.hint = "\n".join([*verdict.lines(), *([log] if log else [])])
        raise error
    if event == "unchanged":
        raise Failed(f"{plan.host}: {reason}; nothing was changed", hint=log)
    commands = "\n".join(str(line) for line in end.get("commands") or [f"ddtree recover --host {plan.host}"])
    raise NeedsHand(f"{plan.host}: the restore failed: {reason}", hint=commands)
