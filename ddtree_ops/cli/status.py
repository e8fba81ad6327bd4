"""``ddtree status``: what runs, since when, how it was proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen, local_time

if TYPE_CHECKING:
    from ddtree_ops.deploy.facts import Facts
    from ddtree_ops.model import Deployment

WatchOption = Annotated[
    bool, typer.Option("--watch", help="Tokens/s, accept length, requests, VRAM and temperature, until Ctrl-C.")
]
IntervalOption = Annotated[float, typer.Option("--interval", min=0.2, max=3600, help="Seconds between two looks.")]
CountOption = Annotated[int | None, typer.Option("--count", min=1, help="With --watch: end after so many looks.")]


@command("status")
def status(
    host: HostOption = None,
    service: ServiceOption = None,
    watch: WatchOption = False,
    interval: IntervalOption = 2.0,
    count: CountOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """What runs on a host, since when, which release, its accept length and the last verdict. Changes nothing."""
    from ddtree_ops.cli.fleet import dialled, select, survey

    screen = Screen(json_=json_)
    if watch:
        from ddtree_ops.cli.watch import watch as live

        return live(screen, select(host, service, None, workspace), interval, count)
    deployments = dialled(select(host, service, None, workspace))

    from ddtree_ops.deploy.drift import find_drift, unproven
    from ddtree_ops.deploy.nodes import mixed, names, probed
    from ddtree_ops.deploy.session import open_session

    def look(deployment: Deployment) -> Facts:
        with open_session(deployment) as session:
            return probed(session)

    def show(deployment: Deployment, seen: Facts) -> tuple[int, dict[str, Any]]:
        apart = mixed(names(deployment), seen.every)
        found = []
        for there, one in zip(deployment.every, seen.every, strict=True):
            doubt = unproven(one) if one.state.confirmed is not None else "nothing is deployed"
            found.append((there, one, doubt, find_drift(one, there.host.supervisor)))
        rows = [summary(there.host.name, there.service_name, one, apart or doubt) for there, one, doubt, _ in found]
        screen.table("", list(rows[0]), [list(row.values()) for row in rows])
        if apart:
            screen.warn(f"{apart}; they do not meet, so nothing is served: ddtree deploy brings them together")
        told = [_tell(screen, *node, name=bool(seen.others)) for node in found]
        document = {**rows[0], **told[0], **({"unproven": apart} if apart else {})}
        if seen.others:
            document["others"] = [{**row, **more} for row, more in zip(rows[1:], told[1:], strict=True)]
        return 0, {"status": document, "summary": f"{seen.active.state}, {rows[0]['verdict']}"}

    return survey(screen, deployments, look, show, table=False)


def _tell(
    screen: Screen, deployment: Deployment, seen: Facts, doubt: str | None, drift: list[str], *, name: bool
) -> dict[str, Any]:
    """What there is to say of one host beside its row, with its ``name`` where it is one of several nodes."""
    where = f"{deployment.host.name}: " if name else ""
    for line in drift:
        screen.warn(f"{where}drift: {line}")
    if doubt:
        screen.warn(f"{where}UNPROVEN: {doubt}")
    if seen.verified is not None:
        kind, at = seen.verified.get("kind"), seen.verified.get("t")
        screen.say(f"verify-exactness said {kind} on {local_time(at if isinstance(at, int | float) else None)}")
    if seen.lock is not None and seen.lock.alive:
        since = local_time(seen.lock.since)
        screen.warn(f"{where}{seen.lock.who or 'somebody'} deploys since {since} (txn {seen.lock.txn})")
    elif seen.unfinished:
        screen.warn(f"{where}deploy {seen.unfinished} did not finish")
    return {"drift": drift, "unproven": doubt, "verified": seen.verified}


def summary(host: str, service: str, seen: Facts, doubt: str | None) -> dict[str, str]:
    """The row of a status or hosts table, every value a string."""
    meta = seen.generation.meta if seen.generation else {}
    profile = meta.get("profile") or {}
    since = seen.active.since_unix
    accept = (seen.server_info or {}).get("avg_spec_accept_length")
    shape = f"{profile['budget']}/{profile['topk']}" if profile.get("budget") else str(profile.get("algorithm", ""))
    return {
        "host": host,
        "service": service,
        "state": seen.active.state,
        "since": local_time(since),
        "generation": str(seen.state.confirmed) if seen.state.confirmed is not None else "",
        "release": str(meta.get("release") or "")[:12],
        "profile": str(profile.get("name", "")),
        "budget/topk": shape,
        "accept length": f"{accept:.2f}" if isinstance(accept, int | float) else "",
        "verdict": str((seen.last_verdict or {}).get("kind", "")) if not doubt else "UNPROVEN",
    }
