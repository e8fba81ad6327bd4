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
    from ddtree_ops.deploy.nodes import names, side_by_side
    from ddtree_ops.deploy.session import open_session
    from ddtree_ops.errors import UsageError

    screen = Screen(json_=json_)
    deployments = select(host, service, None, workspace)
    if len(deployments) != 1:
        raise UsageError("logs shows one host at a time", hint="--host NAME")
    if follow and json_:
        raise UsageError("--follow and --json do not go together: a document has an end")
    with open_session(deployments[0]) as session:

        def look() -> list[list[str]]:
            return side_by_side(session.every, lambda one: list(one.agent.call("logs", lines=lines)["lines"]))

        hosts = names(deployments[0])
        seen = look()
        if screen.json:
            others = {"others": dict(zip(hosts[1:], seen[1:], strict=True))} if hosts[1:] else {}
            screen.document({"ok": True, "host": hosts[0], "lines": seen[0], **others})
            return 0
        show(hosts, seen)
        while follow:
            time.sleep(POLL_S)
            require_reader()
            now = look()
            show(hosts, [new_lines(*pair) for pair in zip(seen, now, strict=True)])
            seen = now
    return 0


def show(hosts: list[str], lines: list[list[str]]) -> None:
    """Lines of each node, with its name where there are several."""
    for host, its in zip(hosts, lines, strict=True):
        for line in its:
            typer.echo(f"{host}: {clean(line)}" if len(hosts) > 1 else clean(line))


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
