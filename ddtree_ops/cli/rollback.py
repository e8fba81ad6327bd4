"""``ddtree rollback``: back to a proven generation, through the same gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.deploy import report, snap_after
from ddtree_ops.cli.plan import OverwriteOption
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment


@command("rollback")
def rollback(
    host: HostOption = None,
    to: Annotated[
        int | None, typer.Option("--to", min=0, help="Generation; default: the proven one before the current.")
    ] = None,
    service: ServiceOption = None,
    overwrite: OverwriteOption = False,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Go back to the previous (or the named) generation. It passes the exactness gate or the host stays as it is."""
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy import rollback as back
    from ddtree_ops.deploy.nodes import probed, settled
    from ddtree_ops.deploy.session import open_session

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with open_session(deployment) as session:
            seen = probed(session)
            target = back.find_target(session, seen, to)
            if not screen.ask(f"Roll {deployment.service_name} on {deployment.host.name} back to {target}?", yes=yes):
                return 1, {"outcome": {"result": "declined"}, "summary": "declined"}
            if settled(session, seen, screen):
                seen = probed(session)
            outcome = back.rollback(session, seen, target, screen, overwrite=overwrite)
            report(screen, outcome)
            snap_after(screen, session)
            return 0, {"outcome": outcome.as_json(), "summary": f"generation {outcome.generation} {outcome.result}"}

    return each(screen, select(host, service, None, workspace), act, stop_at_first_failure=True)
