"""``ddtree stop | start | restart | recover | unlock``: the service by hand, journaled on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ServiceOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from pathlib import Path

    from ddtree_ops.deploy.session import Session
    from ddtree_ops.model import Deployment


def _register(verb: str, words: str, **fields: str) -> None:
    """A command that tells the host one verb; ``words`` are its help."""

    def act(
        host: HostOption = None,
        service: ServiceOption = None,
        yes: YesOption = False,
        workspace: WorkspaceOption = None,
        json_: JsonOption = False,
    ) -> int:
        return _tell_host(verb, host, service, yes, workspace, json_, **fields)

    act.__doc__ = words
    command(verb)(act)


_register("stop", "Stop the service; it stays enabled and starts again at boot.")
_register("start", "Start the service.")
_register("restart", "Stop and start the service.")
_register(
    "recover",
    "Undo a deploy that did not finish: back to the generation that is proven.",
    reason="asked for by the operator",
)


@command("unlock")
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
    from ddtree_ops.cli.fleet import each, select, worst
    from ddtree_ops.deploy.nodes import names, side_by_side
    from ddtree_ops.deploy.session import author, open_session, restore_limit_s

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        name = f"{deployment.service_name} on {' and '.join(names(deployment))}"
        if not screen.ask(f"{verb} {name}?", yes=yes):
            return 1, {"summary": "declined"}
        by = author(deployment.workspace_path)
        limit = restore_limit_s(deployment)
        fields.update(timeout_s=deployment.profile.stop_timeout_s, wait_s=min(limit, 3600), who=by["who"])

        def tell(session: Session) -> dict[str, Any]:
            return session.agent.call(verb, timeout=limit + 30, client=by["client"], **fields)

        with open_session(deployment) as session:
            replies = side_by_side(session.every, tell)  # the ranks of a service wait for one another
            found = [outcome(verb, reply) for reply in replies]
            code = worst([each for each, _ in found])
            if deployment.fronts and verb in ("recover", "start") and code == 0:
                from ddtree_ops.deploy.drain import put_back

                put_back(session, screen)
        for host, (each_code, how) in zip(names(deployment), found, strict=True):
            screen.say(f"{host}: {deployment.service_name}: {how}", "" if each_code == 0 else "yellow")
        others = {"others": replies[1:]} if replies[1:] else {}
        return code, {"reply": replies[0], **others, "summary": found[0][1]}

    return each(screen, select(hosts, service, None, workspace), act)


def outcome(verb: str, reply: dict[str, Any]) -> tuple[int, str]:
    """The exit code and the words for what the host answered: what is so now, not what was asked for."""
    if verb == "unlock":
        was, left = reply.get("was") or {}, reply.get("unfinished")
        if not reply.get("released"):
            return 7, f"still locked by {was.get('who') or '?'} (txn {was.get('txn')}): it goes on with its recovery"
        done = f"ended the deploy of {was.get('who') or '?'} (txn {was.get('txn')})" if was else "nobody held the lock"
        return 0, f"{done}; {left} is unfinished, see: ddtree recover" if left else done
    if verb == "recover":
        now = reply.get("generation")
        stands = f"generation {now}" if now is not None else "nothing is deployed"
        if reply.get("result") == "nothing":
            return 0, f"nothing to recover, {stands}"
        return 0, f"{reply.get('result')}: {stands}"
    state = str((reply.get("active") or {}).get("state"))
    wanted = ("inactive", "failed") if verb == "stop" else ("active", "activating", "reloading")
    return (0 if state in wanted else 1), f"{verb}: {state}"
