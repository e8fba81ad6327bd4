"""``ddtree plan``: what deploy would change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ProfileOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.deploy.facts import Facts
    from ddtree_ops.deploy.plan import Plan
    from ddtree_ops.model import Deployment

AdoptOption = Annotated[
    bool, typer.Option("--adopt", help="Keep a hand-made unit as generation 0, byte for byte, and take over.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what somebody changed on the host.")]


@command("plan", "Deploy")
def plan(
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    adopt: AdoptOption = False,
    overwrite: OverwriteOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Show what deploy would change, as a diff. Writes nothing; exit 3 if anything would change."""
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy.run import Options, open_session

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with open_session(deployment) as session:
            made, seen = session.plan(Options(adopt, overwrite))
        show(screen, made, seen)
        return (3 if made.changes else 0), {"plan": made.as_json(), "summary": made.action}

    return each(screen, select(host, service, profile, workspace), act)


def show(screen: Screen, made: Plan, seen: Facts) -> None:
    """The plan as a person reads it."""
    name = f"{made.host}: {made.service}"
    if seen.lock is not None and seen.lock.alive:
        screen.say(f"{name}: a deploy by {seen.lock.who} is running (txn {seen.lock.txn})", "yellow")
    elif seen.unfinished is not None:
        screen.say(f"{name}: deploy {seen.unfinished} did not finish; the next deploy recovers it first", "yellow")
    if not made.changes:
        screen.say(f"{name}: generation {made.to} runs, release {made.release}, nothing to change")
        return
    screen.say(
        f"{name}: generation {made.from_ if made.from_ is not None else '-'} -> {made.to}, release {made.release}"
    )
    for reason in made.reasons:
        screen.say(f"  * {reason}")
    for line in made.drift:
        screen.say(f"  ! drift: {line}", "yellow")
    if made.release not in seen.releases_installed:
        screen.say("  * the release is not on the host: what its store lacks is sent")
    for note in made.notes:
        screen.say(f"  - {note}")
    for line in made.diff.splitlines():
        screen.say(line, "green" if line[:1] == "+" else "red" if line[:1] == "-" else "")
