"""``ddtree releases`` and ``ddtree prune``: what is installed on a host, who needs it, and removing the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.app import HostOption, JsonOption, WorkspaceOption, YesOption, command
from ddtree_ops.cli.screen import Screen, local_time

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment


@command("releases")
def releases(host: HostOption = None, workspace: WorkspaceOption = None, json_: JsonOption = False) -> int:
    """The releases on a host, newest first: id, size, age, and which service's generations use them."""
    from ddtree_ops.cli.fleet import each, select_hosts
    from ddtree_ops.deploy.session import open_session

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        with open_session(deployment) as session:
            reply = session.agent.call("releases", timeout=300)
        show(screen, f"{deployment.host.name}: releases", reply["releases"], reply["now"])
        screen.say(
            f"  and {megabytes(reply['store'])} in the store, from which the next release takes what is the same"
        )
        return 0, {**reply, "summary": f"{len(reply['releases'])} releases"}

    return each(screen, select_hosts(host, workspace), act, table=False)


@command("prune")
def prune(
    host: HostOption = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest releases stay in any case.")] = 3,
    yes: YesOption = False,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Remove releases that nobody needs, with their blobs and stale uploads; shown first.

    Never one that a service runs, or that its unfinished deploy or its rollback needs, or that a process uses.
    Example: ddtree prune --host ct200 --keep 3
    """
    from ddtree_ops.cli.fleet import each, select_hosts
    from ddtree_ops.deploy.session import author, open_session
    from ddtree_ops.remote.ship import staging_of

    screen = Screen(json_=json_)

    def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
        name = deployment.host.name
        with open_session(deployment) as session:
            given: dict[str, Any] = {"keep": keep, "staging": staging_of(session.transport), "timeout": 600}
            seen = session.agent.call("prune", dry=True, **given)
            gone = [row["id"] for row in seen["remove"]]
            if not gone and not seen["blobs"]["count"] and not seen["staging"]:
                screen.say(f"{name}: nothing to prune")
                return 0, {**seen, "summary": "nothing to prune"}
            show(screen, f"{name}: stays", seen["keep"])
            if gone:
                show(screen, f"{name}: goes", seen["remove"])
            screen.say(
                f"  with {seen['blobs']['count']} blobs of the store and {len(seen['staging'])} stale uploads: "
                f"{megabytes(seen['bytes'])} in all"
            )
            if not screen.ask(f"Remove them from {name}?", yes=yes):
                return 1, {"summary": "declined"}
            by = author(deployment.workspace_path)
            done = session.agent.call("prune", dry=False, expect=gone, who=by["who"], client=by["client"], **given)
        freed = f"{len(gone)} releases removed, {megabytes(done['bytes'])} free again"
        screen.say(f"{name}: {freed}", "green")
        return 0, {**done, "summary": freed}

    return each(screen, select_hosts(host, workspace), act)


def show(screen: Screen, title: str, rows: list[dict[str, Any]], now: float | None = None) -> None:
    """Releases as a table; with ``now``, the host's time, also how old they are."""
    cells = [
        [
            str(row["id"]),
            " ".join(str(row[key]) for key in ("base", "engine", "arch") if row.get(key) not in (None, "none")),
            megabytes(row["bytes"]),
            age(row["installed"], now) if now is not None else local_time(row["installed"]),
            "; ".join(row.get("why") or uses(row)) or ("" if row["whole"] else "not whole"),
        ]
        for row in rows
    ]
    screen.table(title, ["release", "what", "size", "installed", "used by"], cells)


def uses(row: dict[str, Any]) -> list[str]:
    """Who uses a release, one text a use."""
    return [
        f"{use['service']} generation {use['generation']} ({use['role']})" if use["service"] else str(use["role"])
        for use in row["users"]
    ]


def age(when: float | None, now: float) -> str:
    """How long ago, by the host's own clock; a date where that clock was set back meanwhile."""
    if when is None:
        return ""
    seconds = now - when
    if seconds < 0:
        return local_time(when)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
