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
    from ddtree_ops.deploy.session import open_session

    def look(deployment: Deployment) -> Facts:
        with open_session(deployment) as session:
            return session.probe()

    def show(deployment: Deployment, seen: Facts) -> tuple[int, dict[str, Any]]:
        drift = find_drift(seen, deployment.host.supervisor)
        doubt = unproven(seen) if seen.state.confirmed is not None else "nothing is deployed"
        row = summary(deployment.host.name, deployment.service_name, seen, doubt)
        screen.table("", list(row), [list(row.values())])
        for line in drift:
            screen.warn(f"drift: {line}")
        if doubt:
            screen.warn(f"UNPROVEN: {doubt}")
        if seen.verified is not None:
            kind, at = seen.verified.get("kind"), seen.verified.get("t")
            screen.say(f"verify-exactness said {kind} on {local_time(at if isinstance(at, int | float) else None)}")
        if seen.lock is not None and seen.lock.alive:
            screen.warn(
                f"{seen.lock.who or 'somebody'} deploys since {local_time(seen.lock.since)} (txn {seen.lock.txn})"
            )
        elif seen.unfinished:
            screen.warn(f"deploy {seen.unfinished} did not finish")
        return 0, {
            "status": {**row, "drift": drift, "unproven": doubt, "verified": seen.verified},
            "summary": f"{seen.active.state}, {row['verdict']}",
        }

    return survey(screen, deployments, look, show, table=False)


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
