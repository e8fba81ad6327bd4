"""``ddtree stop | start | restart | recover | unlock``: the service by hand, journaled on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from pathlib import Path

    from ddtree_ops.model import Deployment


@command("stop", "Operate")
def stop(
    host: HostOption = None,
    service: ServiceOption = None,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Stop the service; it stays enabled and starts again at boot."""
    return _tell_host("stop", host, service, yes, workspace, json_)


@command("start", "Operate")
def start(
    host: HostOption = None,
    service: ServiceOption = None,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Start the service."""
    return _tell_host("start", host, service, yes, workspace, json_)


@command("restart", "Operate")
def restart(
    host: HostOption = None,
    service: ServiceOption = None,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Stop and start the service."""
    return _tell_host("restart", host, service, yes, workspace, json_)


@command("recover", "Operate")
def recover(
    host: HostOption = None,
    service: ServiceOption = None,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Undo a deploy that did not finish: back to the generation that is proven."""
    return _tell_host("recover", host, service, yes, workspace, json_, reason="asked for by the operator")


@command("unlock", "Operate")
def unlock(
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the host's journal.")],
    host: HostOption = None,
    service: ServiceOption = None,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """End somebody's running deploy; the host recovers."""
    return _tell_host("unlock", host, service, yes, workspace, json_, reason=reason)


def _tell_host(
    verb: str,
    hosts: list[str] | None,
    service: str | None,
    yes: bool,
    workspace: Path | None,
    json_: bool,
    **fields: Any,
) -> int:
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy.run import open_session, restore_limit_s

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        name = f"{deployment.service_name} on {deployment.host.name}"
        if not screen.ask(f"{verb} {name}?", yes=yes):
            return 1, {"summary": "declined"}
        with open_session(deployment) as session:
            reply = session.agent.call(verb, timeout=restore_limit_s(deployment), **fields)
        screen.say(f"{deployment.host.name}: {deployment.service_name}: {verb}: {reply.get('state', 'done')}")
        return 0, {"reply": reply, "summary": verb}

    return each(screen, select(hosts, service, None, workspace), act)
