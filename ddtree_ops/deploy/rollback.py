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
from ddtree_ops.deploy.plan import Plan, expected, seal
from ddtree_ops.deploy.run import apply, new_txn, require_leave
from ddtree_ops.deploy.session import Session, author, bootstrap
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Failed
from ddtree_ops.model import profile_from_json


@dataclasses.dataclass(frozen=True)
class Target:
    """A generation as it lies on the host: its metadata and its files' texts."""

    n: int
    meta: Mapping[str, Any]
    files: Mapping[str, str]

    def __str__(self) -> str:
        if self.meta.get("adopted") is not None:
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
    kept = session.agent.call("generation", n=n)
    return Target(n, kept["meta"], kept["files"])


def rollback(session: Session, seen: Facts, target: Target, ui: Ui, *, overwrite: bool = False) -> Outcome:
    """Back to a generation that is on the host, through the same gate as a deploy.

    Raises what `deploy.run.deploy` raises: Failed for drift that ``overwrite`` does not allow to be replaced, too.
    """
    started = time.monotonic()
    deployment, meta = session.deployment, target.meta
    adopted = meta.get("adopted") is not None
    if adopted:
        ui.warn(
            f"generation {target.n} is a hand-made unit: started and watched, but there is no profile to prove it by"
        )
    else:
        deployment = msgspec.structs.replace(deployment, profile=profile_from_json(target.files["profile.json"]))
        preflight(session.transport, deployment.profile, deployment.workspace_path)
    profile = deployment.profile
    drift = find_drift(seen, deployment.host.supervisor)
    plan = Plan(
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
        drift=() if overwrite else tuple(drift),
        overwrite=overwrite,
        guard=session.cannot_guard(profile) == "",
    )
    require_leave(plan, seen)
    for line in drift:
        ui.warn(f"drift, replaced by the rollback: {line}")
    bootstrap(session, seen, ui)
    sealed = seal(plan, deployment, txn=new_txn(), author=author(deployment.workspace_path))
    with away(session, seen, ui):
        attended = apply(session, sealed, profile, ui, system=seen.system, gate=not adopted)
        confirmed = conclude(session, plan, attended, ui)
    return dataclasses.replace(confirmed, seconds=time.monotonic() - started)


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
