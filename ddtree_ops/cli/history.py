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
        rows = []
        for generation in reply.get("generations", []):
            meta, verdict = generation.get("meta") or {}, generation.get("verdict") or {}
            created = meta.get("created")
            rows.append(
                [
                    str(generation.get("n")) + (" *" if generation.get("n") == reply.get("confirmed") else ""),
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created)) if created else "",
                    str((meta.get("profile") or {}).get("name", "hand-made")),
                    str(meta.get("release") or "")[:12],
                    str(meta.get("who") or ""),
                    str(verdict.get("kind") or "no verdict"),
                ]
            )
        title = f"{deployment.host.name}: {deployment.service_name} (* runs)"
        screen.table(title, ["generation", "made", "profile", "release", "by", "verdict"], rows)
        ends = [e for e in reply.get("journal", []) if e.get("step") == "end"][-limit:]
        for end in ends:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(end.get("t", 0))))
            screen.say(f"{when} {end.get('txn')}: {end.get('event')} {end.get('reason') or ''}".rstrip())
        return 0, {"history": reply}

    return each(screen, select(host, service, None, workspace), act, table=False)
