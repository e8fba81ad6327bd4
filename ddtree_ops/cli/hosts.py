"""``ddtree hosts``: the inventory at a glance, one connection a host, in parallel."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import JsonOption, WorkspaceOption, command, error_json
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment

COLUMNS = ("host", "service", "state", "gpus busy", "release", "budget/topk", "accept length", "verdict", "doctor")


@command("hosts")
def hosts(
    prometheus: Annotated[
        Path | None,
        typer.Option("--prometheus", help="Also write gauges here, for node_exporter's textfile collector."),
    ] = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Every service of every host: GPUs, what runs, how and when it was proven. Exit 6 if a host cannot be reached."""
    from ddtree_ops.cli.fleet import everywhere, load, worst
    from ddtree_ops.cli.output import refuse_unwritable
    from ddtree_ops.cli.status import summary
    from ddtree_ops.deploy.drift import unproven
    from ddtree_ops.deploy.session import open_session
    from ddtree_ops.doctor.glance import glance
    from ddtree_ops.model import resolve

    screen = Screen(json_=json_)
    refuse_unwritable(prometheus, "--prometheus")
    loaded = load(workspace)
    deployments = [
        resolve(loaded, name, service, None) for name, host in loaded.hosts.items() for service in host.services
    ]

    def look(deployment: Deployment) -> dict[str, Any]:
        with open_session(deployment) as session:
            seen = session.probe()
            health, values = glance(deployment, session.transport)
        doubt = unproven(seen) if seen.state.confirmed is not None else None
        row = {**summary(deployment.host.name, deployment.service_name, seen, doubt), **health}
        verdict = (seen.last_verdict or {}).get("passed")
        values |= {
            "ddtree_service_deployed": float(seen.state.confirmed is not None),
            "ddtree_service_active": float(seen.active.state == "active"),
            "ddtree_unproven": float(doubt is not None),
            "ddtree_verdict_passed": float(verdict) if isinstance(verdict, bool) else None,
        }
        return {**row, "verdict": f"{row['verdict']} {row['verdict age']}".strip(), "metrics": values}

    found, failed = everywhere(deployments, look)
    rows: list[dict[str, Any]] = []
    codes = []
    for index, deployment in enumerate(deployments):
        error = failed.get(index)
        blank: dict[str, Any] = {"host": deployment.host.name, "service": deployment.service_name}
        if error is not None:
            blank |= {"state": type(error).__name__.lower(), "error": error_json(error)}
        rows.append(found[index] if error is None else blank)
        codes.append(0 if error is None else error.exit_code)
    if prometheus is not None:
        write_gauges(prometheus, rows)
    if screen.json:
        screen.document({"ok": not any(codes), "hosts": rows})
        return worst(codes)
    screen.table("", COLUMNS, [[str(row.get(column, "")) for column in COLUMNS] for row in rows])
    for error in failed.values():
        screen.warn(error.message)
    return worst(codes)


def write_gauges(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file: node_exporter must never read half of one."""
    from ddtree_ops.cli.output import write_whole
    from ddtree_ops.doctor.exported import exposition

    common = {"ddtree_look_timestamp_seconds": time.time()}
    known = [
        (
            row["host"],
            row["service"],
            {**common, **row.get("metrics", {}), "ddtree_host_reachable": float("error" not in row)},
        )
        for row in rows
    ]
    write_whole(path, exposition(known), "--prometheus")
