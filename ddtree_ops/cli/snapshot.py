"""``ddtree snapshot``: what runs, copied back into git."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.deploy.session import Session
    from ddtree_ops.model import Deployment


@command("snapshot")
def snapshot(
    host: HostOption = None,
    service: ServiceOption = None,
    message: Annotated[
        str | None, typer.Option("-m", "--message", help="Instead of the message that says what changed.")
    ] = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Copy units, drop-ins, manifest and resolved server arguments into snapshots/ and commit them. Secrets stay there.

    Commits its own paths only; nothing changed makes no commit.
    """
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy.session import open_session

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with open_session(deployment) as session:
            commit = snap(session, message)
        what = f"committed {commit[:12]}" if commit else "nothing changed, no commit"
        screen.say(f"{deployment.host.name}: {deployment.service_name}: {what}")
        return 0, {"commit": commit, "summary": what}

    return each(screen, select(host, service, None, workspace), act)


def snap(session: Session, message: str | None) -> str | None:
    """Collect, normalise, commit; the commit's id or None when nothing changed."""
    from ddtree_ops import snapshot as snapshots

    deployment = session.deployment
    collected = session.agent.call("collect", port=deployment.service.port)
    host, service = deployment.host.name, deployment.service_name
    new = snapshots.files(collected, host, service)
    old = snapshots.stored(deployment.workspace_path, new)
    said = message or snapshots.message(old, new, host, service)
    return snapshots.commit(deployment.workspace_path, new, said)
