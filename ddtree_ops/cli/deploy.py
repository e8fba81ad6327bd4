"""``ddtree deploy``: plan, ship, switch, prove, confirm; else roll back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ProfileOption, ServiceOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.plan import AdoptOption, OverwriteOption, show
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.deploy.run import Outcome
    from ddtree_ops.model import Deployment


@command("deploy", "Deploy")
def deploy(
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    adopt: AdoptOption = False,
    overwrite: OverwriteOption = False,
    snapshot: Annotated[
        bool, typer.Option("--snapshot/--no-snapshot", help="Commit a snapshot after a confirmed deploy.")
    ] = True,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Bring a host to what the inventory says, prove that it is exact, or put it back.

    Example: ddtree deploy --host ct200 --profile b16k4
    """
    from ddtree_ops.cli.fleet import each, select
    from ddtree_ops.deploy import run

    screen = Screen(json_=json_)
    options = run.Options(adopt, overwrite)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with run.open_session(deployment) as session:
            made, seen = session.plan(options)
            if not made.changes and seen.unfinished is None and seen.lock is None:
                screen.say(f"{made.host}: {made.service} generation {made.to} runs and is proven, nothing to change")
                return 0, {"outcome": {"result": "unchanged", "generation": made.to}, "summary": "unchanged"}
            show(screen, made, seen)
            if not screen.ask(f"Deploy {made.service} to {made.host}?", yes=yes):
                return 1, {"outcome": {"result": "declined"}, "summary": "declined"}
            if run.settle(session, seen, screen):
                made, seen = session.plan(options)
                show(screen, made, seen)
            outcome = run.deploy(session, made, seen, options, screen)
            report(screen, outcome)
            if snapshot and outcome.result == "confirmed":
                snap_after(screen, session)
            return 0, {"outcome": outcome.as_json(), "summary": f"generation {outcome.generation} {outcome.result}"}

    return each(screen, select(host, service, profile, workspace), act, stop_at_first_failure=True)


def report(screen: Screen, outcome: Outcome) -> None:
    """One line of success, the verdict under it."""
    down = f", down {outcome.downtime_s:.1f} s" if outcome.downtime_s is not None else ""
    kind = f", {outcome.verdict.kind}" if outcome.verdict else ""
    screen.say(
        f"{outcome.host}: {outcome.service} generation {outcome.generation} {outcome.result}{kind}"
        f" (release {outcome.release}, {outcome.bytes_sent} bytes sent{down}, {outcome.seconds:.1f} s in all)",
        "green",
    )
    for line in outcome.verdict.lines() if outcome.verdict else ():
        screen.say(f"  {line}")


def snap_after(screen: Screen, session: Any) -> None:
    """The snapshot that follows a confirmed deploy. It cannot undo the deploy: a problem is said and no more."""
    from ddtree_ops.cli.snapshot import snap
    from ddtree_ops.errors import DdtreeError

    try:
        commit = snap(session, message=None)
    except DdtreeError as error:
        screen.warn(f"deployed, but no snapshot was committed: {error.message}")
        return
    if commit is not None:
        screen.step(f"snapshot committed: {commit[:12]}")
