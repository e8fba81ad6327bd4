"""``ddtree snapshot``: what runs, copied back into git."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli import complete
from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.deploy.session import Session
    from ddtree_ops.model import Deployment


@command("snapshot")
def snapshot(
    host: HostOption = None,
    service: ServiceOption = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="A sweep of this service: its records and report go along, its headline too.",
            autocompletion=complete.runs,
        ),
    ] = None,
    message: Annotated[
        str | None, typer.Option("-m", "--message", help="Instead of the message that says what changed.")
    ] = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Copy units, drop-ins, manifest and resolved server arguments into snapshots/ and commit them. Secrets stay there.

    Commits its own paths only; nothing changed makes no commit. A sweep that was committed stays until another --run.
    """
    from ddtree_ops.cli.fleet import each, nodes, select
    from ddtree_ops.deploy.session import open_session

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with open_session(deployment) as session:
            commit = snap(session, message, run)
        what = f"committed {commit[:12]}" if commit else "nothing changed, no commit"
        screen.say(f"{deployment.host.name}: {deployment.service_name}: {what}")
        return 0, {"commit": commit, "summary": what}

    return each(screen, nodes(select(host, service, None, workspace)), act)


def snap(session: Session, message: str | None, run: Path | None = None) -> str | None:
    """Collect, normalise, commit; the commit's id or None when nothing changed. ``run``: a sweep's directory."""
    from ddtree_ops import snapshot as snapshots

    deployment = session.deployment
    collected = session.agent.call("collect", port=deployment.service.port)
    host, service = deployment.host.name, deployment.service_name
    new = snapshots.files(collected, host, service)
    old = snapshots.stored(deployment.workspace_path, new)
    said = message or snapshots.message(old, new, host, service)
    top = f"snapshots/{host}/{service}/sweep/"
    if run is None:
        new |= {path: text for path, text in old.items() if path.startswith(top)}
    else:
        files, headline = sweep_files(run, host, service)
        new |= {top + name: text for name, text in files.items()}
        said = message or f"{said.rstrip()}\n\nSweep: {headline}\n"
    return snapshots.commit(deployment.workspace_path, new, said)


def sweep_files(run: Path, host: str, service: str) -> tuple[dict[str, str], str]:
    """The records and the report of a sweep of that service, and its headline. Raises UsageError for another's."""
    from ddtree_ops.errors import UsageError
    from ddtree_ops.report.content import headline
    from ddtree_ops.report.write import load_run, report_files
    from ddtree_ops.sweep.records import JOURNAL
    from ddtree_ops.sweep.tables import header

    folder, records, sha256 = load_run(run)
    begun = header(records)
    if (begun.host, begun.service) != (host, service):
        raise UsageError(f"{run} is a sweep of {begun.service} on {begun.host}, not of {service} on {host}")
    text = (folder / JOURNAL).read_text(encoding="utf-8")
    return {JOURNAL: text, **report_files(records, sha256)}, headline(records)
