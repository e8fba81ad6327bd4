"""A service over several hosts as one: looked at, planned, found whole or mixed. On one host it is what that host is.

The transaction in which a generation was made has one name on every node, so nodes whose generations share it stand on
one deploy. Its ranks meet at a port of its own: nodes that stand on different deploys never serve together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.plan import Plan, seal
from ddtree_ops.deploy.session import Options, Session, settle
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.model import Deployment
from ddtree_ops.model.nodes import at_port, ports
from ddtree_ops.model.validate import is_loopback

T = TypeVar("T")
TOGETHER = "the ranks of a service start together"


def side_by_side(sessions: Sequence[Session], act: Callable[[Session], T]) -> list[T]:
    """``act`` at every node at once, in order; raises what the first of them raises."""
    if len(sessions) == 1:
        return [act(sessions[0])]
    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(pool.map(act, sessions))


def probed(session: Session) -> Facts:
    """What `Session.probe` finds, with what it finds at the further nodes."""
    first, *others = side_by_side(session.every, lambda one: one.probe())
    return _joined(first, others)


def planned(session: Session, options: Options) -> tuple[Plan, Facts]:
    """What `Session.plan` makes; of several nodes one plan, in which all change or none does."""
    if not session.others:
        return session.plan(options)
    seen = side_by_side(session.every, lambda one: one.look())
    apart = mixed(names(session.deployment), seen)
    known, used = ports(session.deployment), [_port(one) for one in seen]
    whys = [apart or TOGETHER for _ in seen]
    if apart is None and used[0] is not None and used[0] in known:
        _meet_at(session, used[0])
        plans = _plans(session, seen, options, ["" for _ in seen])
        if not any(one.changes for one in plans):
            return _one(session, plans), _joined(seen[0], seen[1:])
        whys = ["; ".join(one.reasons) or TOGETHER for one in plans]
    _meet_at(session, next(one for one in known if one not in used))
    return _one(session, _plans(session, seen, options, whys)), _joined(seen[0], seen[1:])


def settled(session: Session, seen: Facts, ui: Ui) -> bool:
    """What `session.settle` does, at every node at once: none of them is back before the others are. Raises Locked."""
    found = dict(zip(session.every, seen.every, strict=True))
    return any(side_by_side(session.every, lambda one: settle(one, found[one], ui)))


def names(deployment: Deployment) -> list[str]:
    """Its hosts, by rank."""
    return [one.host.name for one in deployment.every]


def mixed(hosts: Sequence[str], seen: Sequence[Facts]) -> str | None:
    """That the nodes of a service do not stand on one deploy, with what each stands on; None where they do."""
    stand = [None if one.generation is None else one.generation.meta.get("txn") for one in seen]
    if len(set(stand)) == 1:
        return None
    told = [
        f"{host} stands on generation {one.state.confirmed} ({txn})" if txn else f"{host} on nothing"
        for host, one, txn in zip(hosts, seen, stand, strict=True)
    ]
    return "the nodes are mixed: " + ", ".join(told)


def sealed(
    plan: Plan, deployments: Sequence[Deployment], *, txn: str, author: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The sealed plan of every node, rank 0's first, under one transaction's name."""
    together = {"together": True} if plan.others else {}
    each = zip(plan.every, deployments, strict=True)
    return [{**seal(one, there, txn=txn, author=author), **together} for one, there in each]


def _plans(session: Session, seen: Sequence[Facts], options: Options, whys: Sequence[str]) -> list[Plan]:
    """Each node's plan; ``whys``: for what each changes though nothing of it differs."""
    found = dict(zip(session.every, zip(seen, whys, strict=True), strict=True))
    return side_by_side(session.every, lambda one: one.plan(options, *found[one])[0])


def _one(session: Session, plans: list[Plan]) -> Plan:
    """Rank 0's plan with the others'; in each is whether the host can keep others off its workers' ports."""
    if plans[0].changes:
        plans = [
            dataclasses.replace(plan, exposed=why, notes=(*plan.notes, *([why] if why else [])))
            for plan, why in zip(plans, side_by_side(session.every, _exposed), strict=True)
        ]
    return dataclasses.replace(plans[0], others=tuple(plans[1:]))


def _exposed(session: Session) -> str:
    """Why others than the nodes reach the ports of its workers; empty where they do not, or the profile says why."""
    group = session.deployment.profile.nodes
    if group is None or all(map(is_loopback, group.addresses)) or session.deployment.profile.open is not None:
        return ""
    why = str(session.agent.call("guard")["why"])
    return f"others than its nodes reach the ports of its workers, which unpickle what comes: {why}" if why else ""


def _meet_at(session: Session, port: int) -> None:
    moved = at_port(session.deployment, port)
    for one, deployment in zip(session.every, moved.every, strict=True):
        one.deployment = deployment


def _port(seen: Facts) -> int | None:
    profile = (seen.generation.meta if seen.generation is not None else {}).get("profile") or {}
    port = (profile.get("nodes") or {}).get("port")
    return port if isinstance(port, int) else None


def _joined(first: Facts, others: Sequence[Facts]) -> Facts:
    return msgspec.structs.replace(first, others=list(others)) if others else first
