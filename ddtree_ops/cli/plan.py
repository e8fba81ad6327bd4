"""``ddtree plan``: what deploy would change."""

from __future__ import annotations

from pathlib import Path
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


@command("plan")
def plan(
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    adopt: AdoptOption = False,
    overwrite: OverwriteOption = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the plan here; `ddtree deploy FILE` applies exactly it."),
    ] = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Show what deploy would change, as a diff. Changes nothing; exit 3 if anything would change."""
    from ddtree_ops.cli.fleet import dialled, select, survey
    from ddtree_ops.cli.output import refuse_unwritable, write_whole

    screen = Screen(json_=json_)
    refuse_unwritable(output, "--output")
    deployments = dialled(select(host, service, profile, workspace))

    from ddtree_ops.deploy.nodes import planned
    from ddtree_ops.deploy.session import Options, open_session
    from ddtree_ops.errors import UsageError

    if output is not None and any(one.others for one in deployments):
        raise UsageError(
            "a plan of a service over several hosts is not written to a file",
            hint="ddtree deploy makes it anew and shows it before it asks",
        )
    kept: list[tuple[Plan, Facts, Deployment]] = []

    def look(deployment: Deployment) -> tuple[Plan, Facts]:
        with open_session(deployment) as session:
            return planned(session, Options(adopt, overwrite))

    def tell(deployment: Deployment, found: tuple[Plan, Facts]) -> tuple[int, dict[str, Any]]:
        made, seen = found
        show(screen, made, seen)
        kept.append((made, seen, deployment))
        return (3 if made.changes else 0), {"plan": made.as_json(), "summary": made.action}

    code = survey(screen, deployments, look, tell)
    if output is not None and code in (0, 3):
        from ddtree_ops.deploy import planfile
        from ddtree_ops.deploy.session import author

        text = planfile.to_text([planfile.stored(*one) for one in kept], author(deployments[0].workspace_path))
        write_whole(output, text, "--output")
        screen.step(f"plan written to {output}; apply it with: ddtree deploy {output}")
    elif output is not None:
        screen.warn(f"no plan was written to {output}: not every host could be looked at")
    return code


def show(screen: Screen, made: Plan, seen: Facts) -> None:
    """The plan as a person reads it; of several nodes one after the other."""
    for plan, found in zip(made.every, seen.every, strict=True):
        _show(screen, plan, found)


def _show(screen: Screen, made: Plan, seen: Facts) -> None:
    name = f"{made.host}: {made.service}"
    if seen.lock is not None and seen.lock.alive:
        screen.say(
            f"{name}: {seen.lock.what or 'something'} by {seen.lock.who} is running (txn {seen.lock.txn})", "yellow"
        )
    elif seen.unfinished is not None:
        screen.say(f"{name}: deploy {seen.unfinished} did not finish; the next deploy recovers it first", "yellow")
    if not made.changes:
        screen.say(f"{name}: generation {made.to} runs, release {made.release}, nothing to change")
        for note in made.notes:
            screen.say(f"  - {note}")
        return
    screen.say(
        f"{name}: generation {made.from_ if made.from_ is not None else '-'} -> {made.to}, release {made.release}"
    )
    for reason in made.reasons:
        screen.say(f"  * {reason}")
    for line in made.drift:
        screen.say(f"  ! drift: {line}", "yellow")
    if made.behind:
        screen.say(f"  ! {made.behind}", "yellow")
    for line in consequences(made):
        screen.say(f"  - {line}")
    for note in made.notes:
        screen.say(f"  - {note}")
    for line in made.diff.splitlines():
        screen.say(line, "green" if line[:1] == "+" else "red" if line[:1] == "-" else "")


def consequences(made: Plan) -> list[str]:
    """What is sent, what restarts, how long nothing is served."""
    found = []
    if made.transfer is not None:
        files, size = made.transfer.files, made.transfer.bytes
        if files is None or size is None:
            found.append("sends the release: it is not built yet, so its size is not known (ddtree build)")
        else:
            found.append(f"sends {files} files, {size / 1e6:.1f} MB before compression")
    if made.restarts is None:
        found.append("nothing restarts: the service does not run; no downtime")
    else:
        last = f"{made.downtime_s:.0f} s, as the last time" if made.downtime_s else "unknown, this is the first time"
        found.append(f"restarts {made.restarts}; downtime: {last}; at most {made.downtime_limit_s:.0f} s (stop + load)")
    return found
