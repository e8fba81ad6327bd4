"""Back to a generation that is on the host, through the same gate as a deploy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ddtree_ops.deploy.aftermath import Outcome, conclude
from ddtree_ops.deploy.drain import away
from ddtree_ops.deploy.drift import find_drift
from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.gate import preflight
from ddtree_ops.deploy.nodes import sealed
from ddtree_ops.deploy.plan import Plan, expected
from ddtree_ops.deploy.run import apply, new_txn, require_leave
from ddtree_ops.deploy.session import Session, author, bootstrap
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Failed
from ddtree_ops.model import Deployment, profile_from_json


@dataclasses.dataclass(frozen=True)
class Target:
    """A generation as it lies on the host: its metadata and its files' texts."""

    n: int
    meta: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def adopted(self) -> bool:
        """Whether it is a hand-made unit."""
        return self.meta.get("adopted") is not None

    def __str__(self) -> str:
        if self.adopted:
            return f"generation {self.n} (a hand-made unit)"
        profile = (self.meta.get("profile") or {}).get("name")
        return f"generation {self.n} (profile {profile}, release {self.meta.get('release')})"


def find_target(session: Session, seen: Facts, to: int | None) -> Target:
    """What ``ddtree rollback`` would go back to: generation ``to``, by default the newest proven one before what runs.

    Raises Failed when there is none or the named one does not exist.
    """
    history = session.agent.call("history", limit=200)
    try:
        n = choose_rollback(seen, history.get("generations", []), to)
    except Failed as error:
        raise Failed(f"{session.deployment.host.name}: {error.message}", hint=error.hint) from None
    return _target(session, n)


def rollback(session: Session, seen: Facts, target: Target, ui: Ui, *, overwrite: bool = False) -> Outcome:
    """Back to a generation that is on the host, through the same gate as a deploy; on several nodes to one deploy's.

    Raises what `deploy.run.deploy` raises: Failed for drift that ``overwrite`` does not allow to be replaced, too.
    """
    started = time.monotonic()
    targets = [target, *(_same_deploy(one, target) for one in session.others)]
    adopted = target.adopted
    if adopted:
        ui.warn(
            f"generation {target.n} is a hand-made unit: started and watched, but there is no profile to prove it by"
        )
    deployments = [_as_then(one.deployment, there) for one, there in zip(session.every, targets, strict=True)]
    deployment = deployments[0]
    if not adopted:
        preflight(session.transport, deployment.profile, deployment.workspace_path)
    plans = []
    for one, found, there, back in zip(session.every, seen.every, deployments, targets, strict=True):
        plans.append(_plan(one, found, there, back, overwrite))
        require_leave(plans[-1], found)
        for line in find_drift(found, there.host.supervisor):
            ui.warn(f"drift, replaced by the rollback: {line}")
        bootstrap(one, found, ui)
    plan = dataclasses.replace(plans[0], others=tuple(plans[1:]))
    documents = sealed(plan, deployments, txn=new_txn(), author=author(deployment.workspace_path))
    with away(session, seen, ui):
        attended = apply(session, documents, deployment.profile, ui, seen=seen, gate=not adopted)
        confirmed = conclude(session, plan, attended, ui)
    return dataclasses.replace(confirmed, seconds=time.monotonic() - started)


def _same_deploy(session: Session, target: Target) -> Target:
    """What a further node goes back to: its generation of the deploy that rank 0's is of. Raises Failed."""
    txn = target.meta.get("txn")
    for row in session.agent.call("history", limit=1).get("generations", []):
        if row.get("txn") == txn:
            return _target(session, int(row["n"]))
    host = session.deployment.host.name
    raise Failed(f"{host}: has no generation of that deploy ({txn}); nothing was changed", hint="see: ddtree history")


def _target(session: Session, n: int) -> Target:
    kept = session.agent.call("generation", n=n)
    return Target(n, kept["meta"], kept["files"])


def _as_then(deployment: Deployment, target: Target) -> Deployment:
    if target.adopted:
        return deployment
    return msgspec.structs.replace(deployment, profile=profile_from_json(target.files["profile.json"]))


def _plan(session: Session, seen: Facts, deployment: Deployment, target: Target, overwrite: bool) -> Plan:
    meta, profile = target.meta, deployment.profile
    return Plan(
        host=deployment.host.name,
        service=deployment.service_name,
        action="rollback",
        from_=seen.state.confirmed,
        to=target.n,
        release=meta.get("release"),
        meta={
            "health": meta.get("health")
            or {"port": deployment.service.port, "timeout_s": profile.load_timeout_s, "expect": {}, "fatal": []}
        },
        expect=expected(seen),
        drift=() if overwrite else tuple(find_drift(seen, deployment.host.supervisor)),
        overwrite=overwrite,
        guard=session.cannot_guard(profile) == "",
    )


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
