"""``ddtree hosts``: the inventory at a glance, one probe a host, in parallel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ddtree_ops.cli.app import JsonOption, WorkspaceOption, command, error_json
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment

PARALLEL = 16
COLUMNS = ("host", "service", "state", "gpus busy", "release", "budget/topk", "accept length", "verdict", "doctor")


@command("hosts", "Look")
def hosts(workspace: WorkspaceOption = None, json_: JsonOption = False) -> int:
    """Every service of every host: GPUs, what runs, how and when it was proven. Exit 6 if a host cannot be reached."""
    from ddtree_ops.cli.fleet import worst
    from ddtree_ops.cli.status import summary
    from ddtree_ops.deploy.plan import unproven
    from ddtree_ops.deploy.run import open_session
    from ddtree_ops.doctor.glance import glance
    from ddtree_ops.errors import DdtreeError
    from ddtree_ops.model import find_workspace, load_workspace, resolve

    screen = Screen(json_=json_)
    loaded = load_workspace(find_workspace(workspace))
    deployments = [
        resolve(loaded, name, service, None) for name, host in loaded.hosts.items() for service in host.services
    ]

    def look(deployment: Deployment) -> dict[str, Any]:
        with open_session(deployment) as session:
            seen = session.probe()
            health = glance(deployment, session.transport)
        doubt = unproven(seen) if seen.state.confirmed is not None else None
        row = {**summary(deployment.host.name, deployment.service_name, seen, doubt), **health}
        return {**row, "verdict": f"{row['verdict']} {row['verdict age']}".strip()}

    rows: list[dict[str, Any]] = []
    codes: list[int] = []
    with ThreadPoolExecutor(PARALLEL) as pool:
        futures = [(deployment, pool.submit(look, deployment)) for deployment in deployments]
        for deployment, future in futures:
            try:
                rows.append(future.result())
                codes.append(0)
            except DdtreeError as error:
                codes.append(error.exit_code)
                name = {"host": deployment.host.name, "service": deployment.service_name}
                rows.append({**name, "state": type(error).__name__.lower(), "error": error_json(error)})
    if screen.json:
        screen.document({"ok": not any(codes), "hosts": rows})
        return worst(codes)
    screen.table("", COLUMNS, [[str(row.get(column, "")) for column in COLUMNS] for row in rows])
    for row in rows:
        if "error" in row:
            screen.warn(row["error"]["message"])
    return worst(codes)
