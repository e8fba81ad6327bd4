"""``ddtree deploy``: plan, ship, switch, prove, confirm; else roll back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ProfileOption, ServiceOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.plan import AdoptOption, OverwriteOption
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.deploy.aftermath import Outcome


@command("deploy")
def deploy(
    file: Annotated[
        Path | None, typer.Argument(help="A plan that `ddtree plan -o` wrote: exactly it is applied, or refused.")
    ] = None,
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    adopt: AdoptOption = False,
    overwrite: OverwriteOption = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on to the other hosts after one that failed.")
    ] = False,
    snapshot: Annotated[
        bool, typer.Option("--snapshot/--no-snapshot", help="Commit a snapshot after a confirmed deploy.")
    ] = True,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Bring a host to what the inventory says, prove that it is exact, or put it back.

    Several hosts are looked at all at once and changed in the workspace's order, max_unavailable of them at a time; a
    host that fails stops the rest. Example: ddtree deploy --host ct200 --profile b16k4
    """
    from ddtree_ops.cli.fleet import chosen, dialled, load
    from ddtree_ops.errors import UsageError

    loaded = load(workspace)
    wanted = []
    if file is None:
        wanted = dialled(chosen(loaded, host, service, profile))

    from ddtree_ops.cli.rollout import Rollout
    from ddtree_ops.deploy.session import Options

    if file is None:
        rollout = Rollout(loaded, Options(adopt, overwrite), keep_going, snapshot, yes, Screen(json_=json_))
        return rollout.run([(one, None) for one in wanted])
    if host or service is not None or profile is not None or adopt or overwrite:
        raise UsageError("a plan file says all by itself", hint="give --host, --profile, ... to ddtree plan -o")
    from ddtree_ops.deploy import planfile

    kept = [(planfile.deployment_of(loaded, one), one) for one in planfile.read(file)]
    return Rollout(loaded, Options(), keep_going, snapshot, yes, Screen(json_=json_)).run(kept)


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

    for one in session.every:
        try:
            commit = snap(one, message=None)
        except DdtreeError as error:
            screen.warn(f"deployed, but no snapshot was committed: {error.message}")
            continue
        if commit is not None:
            screen.step(f"snapshot committed: {commit[:12]}")
