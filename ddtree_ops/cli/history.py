"""``ddtree history``: the generations of a service and how each came to be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment


@command("history", "Look")
def history(
    host: HostOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many journal ends to show.")] = 20,
    service: ServiceOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Every deploy and rollback of a service with its end, newest last."""
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy.run import open_session

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with open_session(deployment) as session:
            reply = session.agent.call("history", limit=limit)
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
            how = f"{row.get('action') or row.get('note') or ''} to {row.get('target')}: {row['end'] or 'unfinished'}"
            screen.say(f"{local_time(row['t'])} {row['txn']} {how} {row.get('reason') or ''}".rstrip())
        return 0, {"history": reply}

    return each(screen, select(host, service, None, workspace), act, table=False)


def local_time(when: float | None) -> str:
    """Unix seconds as this machine's date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else ""
