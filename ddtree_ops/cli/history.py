"""``ddtree history``: the generations of a service and how each came to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen, local_time

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment


@command("history")
def history(
    host: HostOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many journal ends to show.")] = 20,
    service: ServiceOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Every deploy and rollback of a service with its end, newest last."""
    from ddtree_ops.cli.fleet import nodes, select, survey
    from ddtree_ops.deploy.session import open_session

    screen = Screen(json_=json_)

    def look(deployment: Deployment) -> dict[str, Any]:
        with open_session(deployment) as session:
            return session.agent.call("history", limit=limit)

    def show(deployment: Deployment, reply: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        rows = [
            [
                f"{row['n']} *" if row["n"] == reply["current"] else str(row["n"]),
                local_time(row["created"]),
                str(row["profile"] or "hand-made"),
                str(row["release"] or ""),
                str(row["who"] or ""),
                str(row["verdict"] or "no verdict"),
            ]
            for row in reply["generations"]
        ]
        title = f"{deployment.host.name}: {deployment.service_name} (* runs)"
        screen.table(title, ["generation", "made", "profile", "release", "by", "verdict"], rows)
        for row in reversed(reply["history"]):
            screen.say(f"{local_time(row['t'])} {row['txn']} {told(row)}")
        return 0, {"history": reply}

    return survey(screen, nodes(select(host, service, None, workspace)), look, show, table=False)


def told(row: dict[str, Any]) -> str:
    """One transaction in words. What an operator did by hand (stop, start, restart) has no target and no end."""
    if row.get("action") is None:
        how, by = str(row.get("note") or "?"), row.get("who")
    else:
        how, by = f"{row['action']} to {row.get('target')}: {row['end'] or 'unfinished'}", None
    return " ".join(part for part in (how, f"by {by}" if by else "", row.get("reason") or "") if part)
