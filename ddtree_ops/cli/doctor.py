"""``ddtree doctor``: what will go wrong on a host, said before it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, ProfileOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen

if TYPE_CHECKING:
    from ddtree_ops.doctor.check import Finding
    from ddtree_ops.doctor.examine import Report
    from ddtree_ops.model import Deployment

STYLES = {"error": "red", "warning": "yellow", "info": ""}
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", metavar="CHECK", help="Make this check or group alone; several times.")
]
SkipOption = Annotated[
    list[str] | None, typer.Option("--skip", metavar="CHECK", help="Leave this check or group out; several times.")
]


@command("doctor")
def doctor(
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    active: Annotated[
        bool, typer.Option("--active", help="Also run kernels, copies and an all-reduce there; refused on a busy GPU.")
    ] = False,
    patience: Annotated[
        float, typer.Option("--patience", min=0.5, max=120, help="Seconds that the host has to tell its facts.")
    ] = 2.7,
    facts: Annotated[
        Path | None, typer.Option("--facts", help="Judge these facts, collected before; ask no host.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the facts of the host here.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the checks and contact nobody.")] = False,
    collector: Annotated[
        bool, typer.Option("--collector", help="Print the script that collects facts and contact nobody.")
    ] = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Preflight of a host: every check named, what was seen and expected, what to do. Exit 1 if any is an error.

    Changes nothing, with --active apart, which runs things there and leaves nothing behind.
    """
    from ddtree_ops.cli.fleet import each, nodes, select
    from ddtree_ops.cli.output import refuse_unwritable, write_whole
    from ddtree_ops.doctor import run
    from ddtree_ops.errors import UsageError

    screen = Screen(json_=json_)
    if list_:
        return show_checks(screen)
    if collector:
        from ddtree_ops.doctor.collector import script

        typer.echo(script(), nl=False)
        return 0
    refuse_unwritable(save, "--save")
    wanted = run.choose(only or (), skip or (), active=active)
    deployments = nodes(select(host, service, profile, workspace))
    if (facts or save) and len(deployments) != 1:
        raise UsageError("--facts and --save are about one host", hint="--host NAME")
    if facts and active:
        raise UsageError("--facts asks no host, --active runs things on one", hint="leave one of them out")
    given = None if facts is None else read_facts(facts)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        report, seen = run.doctor(deployment, wanted, limit_s=patience, facts=given, say=screen.step)
        if save is not None:
            write_whole(save, json.dumps(seen, indent=1, sort_keys=True) + "\n", "--save")
        show(screen, deployment, report)
        said = {"doctor": report.as_json(), "collector": seen.get("collector")}
        return int(report.failed), {**said, "summary": report.summary()}

    return each(screen, deployments, act)


def read_facts(path: Path) -> dict[str, Any]:
    """A file that --save wrote, or what the collector's script printed."""
    from ddtree_ops.doctor.collector import REPLY_LIMIT, parse
    from ddtree_ops.errors import Failed, UsageError

    limit = 4 * REPLY_LIMIT  # --save writes a reply with more white space than it came with
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise UsageError(f"--facts {path}: {error.strerror}") from error
    if len(data) > limit:
        raise UsageError(f"--facts {path}: larger than {limit >> 20} MiB, which no facts are")
    try:
        return parse(data, f"--facts {path}")
    except Failed as error:  # a file that is invalid, not a host that failed
        raise UsageError(error.message, hint=error.hint) from error


def show(screen: Screen, deployment: Deployment, report: Report) -> None:
    """The report as a person reads it, errors first within their group."""
    group = ""
    screen.say(f"{deployment.host.name}: {deployment.service_name}, profile {deployment.profile.name}")
    for finding in report.findings:
        if finding.group != group:
            group = finding.group
            screen.say(f"\n{group}")
        show_finding(screen, finding)
    for finding in report.silenced:
        screen.say(f"  silenced {finding.id}: {one_line(finding.seen)} ({finding.reason})")
    for id_, why in report.not_made.items():
        screen.say(f"  not made {id_}: {one_line(why)}", "yellow")
    screen.say(report.summary(), "red" if report.failed else "green" if not report.findings else "yellow")


def show_finding(screen: Screen, finding: Finding) -> None:
    screen.say(f"  {finding.severity.upper()} {finding.id}", STYLES[finding.severity])
    lines = [("seen", finding.seen), ("expected", finding.expected), ("do", finding.do), ("see", finding.reference)]
    lines += [("profile", finding.reason)] if finding.reason else []
    for name, text in lines:
        screen.say(f"    {name:<9}{one_line(text)}")


def one_line(text: str) -> str:
    """A host's word cannot begin a line of the report, which would pass for the doctor's own."""
    return text.replace("\n", "\\n")


def show_checks(screen: Screen) -> int:
    """Every check by group, the active ones last."""
    from ddtree_ops.doctor.table import rows

    found = rows()
    if screen.json:
        screen.document({"ok": True, "checks": [row._asdict() for row in found]})
    else:
        screen.table("", ["check", "group", "severity", "proves"], [[r.id, r.group, r.severity, r.what] for r in found])
    return 0
