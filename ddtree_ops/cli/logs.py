"""``ddtree logs``: the service's own log."""

from __future__ import annotations

import select
import sys
import time
from typing import Annotated

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, clean, command
from ddtree_ops.cli.screen import Screen

POLL_S = 1.0


@command("logs")
def logs(
    host: HostOption = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=5000, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    service: ServiceOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """The last lines of the service's log. Control characters are made visible."""
    from ddtree_ops.cli.fleet import select
    from ddtree_ops.deploy.session import open_session
    from ddtree_ops.errors import UsageError

    screen = Screen(json_=json_)
    deployments = select(host, service, None, workspace)
    if len(deployments) != 1:
        raise UsageError("logs shows one host at a time", hint="--host NAME")
    if follow and json_:
        raise UsageError("--follow and --json do not go together: a document has an end")
    with open_session(deployments[0]) as session:
        seen: list[str] = session.agent.call("logs", lines=lines)["lines"]
        if screen.json:
            screen.document({"ok": True, "host": deployments[0].host.name, "lines": seen})
            return 0
        for line in seen:
            typer.echo(clean(line))
        while follow:
            time.sleep(POLL_S)
            require_reader()
            now: list[str] = session.agent.call("logs", lines=lines)["lines"]
            for line in new_lines(seen, now):
                typer.echo(clean(line))
            seen = now
    return 0


def require_reader() -> None:
    """Raises BrokenPipeError once nobody reads stdout: a quiet log would never find out by writing."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
        raise BrokenPipeError


def new_lines(before: list[str], now: list[str]) -> list[str]:
    """The lines of ``now`` after the longest end of ``before`` that ``now`` still starts with."""
    for start in range(len(before)):
        tail = before[start:]
        if now[: len(tail)] == tail:
            return now[len(tail) :]
    return now
