"""Looking at a host and judging it: the acting half of ``ddtree doctor``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from ddtree_ops.doctor.active import ACTIVE, try_out
from ddtree_ops.doctor.check import CHECKS, Case
from ddtree_ops.doctor.collector import LIMIT_S, collect, request
from ddtree_ops.doctor.examine import Report, chosen, examine, take
from ddtree_ops.doctor.facts import NUMBER_LIMIT, host_facts
from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment
from ddtree_ops.remote.transport import Transport, connect


def choose(only: Collection[str], skip: Collection[str], *, active: bool) -> set[str]:
    """The ids to make. Raises UsageError for an unknown one, and for an active one without ``--active``."""
    known = {*CHECKS, *ACTIVE}
    named = sorted(set(only) & set(ACTIVE))
    if named and not active:
        raise UsageError(f"{named[0]} is an active check: it runs things on the host", hint="say --active as well")
    left = chosen(known, only, skip) - (set() if active else set(ACTIVE))
    if not left:
        raise UsageError("what is left are active checks: they run things on the host", hint="say --active as well")
    return left


def look(deployment: Deployment, transport: Transport, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """One round trip: the collector's reply, with how far the host's clock is off as far as that can be told."""
    asked = request(deployment, limit_s=limit_s)
    before = time.time()
    reply = collect(transport, asked)
    return with_clock(reply, before, time.time())


def with_clock(reply: dict[str, Any], before: float, after: float) -> dict[str, Any]:
    """Add ``behind_s``: the host looked at its clock at some time between ``before`` and ``after``."""
    clock = reply.get("clock")
    host = clock.get("unix") if isinstance(clock, dict) else None
    if isinstance(clock, dict) and isinstance(host, int | float) and abs(host) < NUMBER_LIMIT:
        clock["behind_s"] = before - host if host < before else after - host if host > after else 0.0
    return reply


def doctor(
    deployment: Deployment,
    wanted: Collection[str],
    *,
    limit_s: float = LIMIT_S,
    facts: dict[str, Any] | None = None,
    say: Callable[[str], None],
) -> tuple[Report, dict[str, Any]]:
    """Judge a deployment's host, by ``facts`` that were collected before or by asking it; the report and the facts.

    Active checks run when ``wanted`` has them. Raises Unreachable, and Failed when no facts come.
    """
    if facts is not None:
        return examine(Case(deployment, host_facts(facts)), wanted), facts
    with connect(deployment.host) as transport:
        reply = look(deployment, transport, limit_s)
        case = Case(deployment, host_facts(reply))
        report = examine(case, wanted)
        if set(wanted) & set(ACTIVE):
            for id_, found in try_out(case, transport, wanted, say).items():
                take(report, id_, found, case.profile.checks)
    return report, reply
