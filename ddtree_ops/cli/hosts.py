"""``ddtree hosts``: the inventory at a glance, one probe a host, in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtree_ops.cli.app import JsonOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment


@command("hosts", "Look")
def hosts(workspace: WorkspaceOption = None, json_: JsonOption = False) -> int:
    """Every service of every host: reachable, what runs, how it was proven. Exit 6 if a host cannot be reached."""
    from ddtree_ops.cli.fleet import everywhere, worst
    from ddtree_ops.cli.status import summary
    from ddtree_ops.deploy.drift import unproven
    from ddtree_ops.deploy.session import open_session
    from ddtree_ops.model import find_workspace, load_workspace, resolve

    screen = Screen(json_=json_)
    loaded = load_workspace(find_workspace(workspace))
    deployments = [
        resolve(loaded, name, service, None) for name, host in loaded.hosts.items() for service in host.services
    ]

    def look(deployment: Deployment) -> dict[str, str]:
        with open_session(deployment) as session:
            seen = session.probe()
        doubt = unproven(seen) if seen.state.confirmed is not None else None
        return summary(deployment.host.name, deployment.service_name, seen, doubt)

    found, failed = everywhere(deployments, look)
    rows, codes = [], []
    for index, deployment in enumerate(deployments):
        error = failed.get(index)
        blank = {"host": deployment.host.name, "service": deployment.service_name}
        rows.append(found[index] if error is None else {**blank, "state": error.message})
        codes.append(0 if error is None else error.exit_code)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if screen.json:
        screen.document({"ok": not any(codes), "hosts": rows})
    else:
        screen.table("", columns, [[row.get(column, "") for column in columns] for row in rows])
    return worst(codes)
