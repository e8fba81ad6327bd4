"""``ddtree build``: a release from pins and patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli import complete
from ddtree_ops.cli.app import JsonOption, ProfileOption, ServiceOption, WorkspaceOption, command
from ddtree_ops.cli.screen import Screen
from ddtree_ops.errors import UsageError

if TYPE_CHECKING:
    from ddtree_ops.release import Target


@command("build")
def build(
    engine: Annotated[str | None, typer.Option("--engine", help="sglang, router or reference (default).")] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", help="GPU arch such as sm_120; none for the CPU engine.")
    ] = None,
    slim: Annotated[bool, typer.Option("--slim", help="Leave out what the arch never loads.")] = False,
    python: Annotated[
        str | None, typer.Option("--python", help="The host's Python (default: the newest locked).")
    ] = None,
    wheels: Annotated[
        str, typer.Option("--wheels", help="ship all, or index: stock wheels from the host's own.")
    ] = "ship",
    provided: Annotated[
        list[str] | None,
        typer.Option("--provided", metavar="NAME[==VERSION]", help="What the host has already; several times."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Take all of this from a host and its inventory.", autocompletion=complete.hosts),
    ] = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """Make a release, print its id. The same inputs give the same id anywhere."""
    from ddtree_ops import release

    if wheels not in ("ship", "index"):
        raise UsageError(f"--wheels: not {wheels!r}", hint="ship, index")
    if host is not None:
        if engine or arch or slim or python or provided or wheels != "ship":
            raise UsageError("--host takes engine, arch, Python and the rest from the inventory and the host")
        target = _of_host(host, service, profile, workspace)
    elif service is not None or profile is not None:
        raise UsageError("--service and --profile are of a host's inventory", hint="--host NAME")
    else:
        base = _base(engine or "reference")
        newest = release.locked_pythons(base)[-1]
        target = release.Target(
            base,
            python or newest,
            arch or "none",
            wheels="index" if wheels == "index" else "ship",
            slim=slim,
            provided=tuple(provided or ()),
        )
    screen = Screen(json_=json_)
    if why := release.untried_base(target.base):
        screen.warn(f"{target.base}: {why}")
    made = release.build(target, progress=screen.progress)
    show(screen, made.manifest)
    return 0


def show(screen: Screen, manifest: dict[str, Any]) -> None:
    """The id alone on stdout; what it is and what it lacks beside it."""
    size, left_out = manifest["total_size"], manifest["left_out"]
    if screen.json:
        told = {key: value for key, value in manifest.items() if key not in ("files", "id", "total_size")}
        screen.document(
            {"ok": True, "release": manifest["id"], "files": len(manifest["files"]), "bytes": size, "manifest": told}
        )
        return
    screen.say(manifest["id"])
    screen.step(f"{len(manifest['files'])} files, {size / 1e6:.0f} MB")
    for name, version in manifest["requires"]["provided"].items():
        screen.step(f"provided by the host: {name} {version}")
    if requirements := manifest["index_requirements"]:
        screen.step(f"{len(requirements)} wheels come from the host's own index")
    unfetched: dict[tuple[str, bool], list[str]] = {}
    for rule in left_out if manifest["slim"] else ():
        if rule["bytes"] is None:
            unfetched.setdefault((rule["why"], rule["proven"]), []).append(rule["what"])
            continue
        size = f"{rule['bytes'] / 1e6:.1f} MB in {rule['files']} files"
        screen.step(f"left out: {rule['what']}: {size}: {rule['why']}{_doubt(rule['proven'])}")
    for (why, proven), names in unfetched.items():
        screen.step(f"not fetched: {', '.join(names)}: {why}{_doubt(proven)}")


def _doubt(proven: bool) -> str:
    return "" if proven else " (not proven on that arch)"


def _base(engine: str) -> str:
    from ddtree_ops.model.resolve import ENGINE_DEFAULTS
    from ddtree_ops.model.routers import RELEASE_BASE

    if engine == "router":
        return RELEASE_BASE
    if engine not in ENGINE_DEFAULTS:
        raise UsageError(f"--engine: not {engine!r}", hint=", ".join([*ENGINE_DEFAULTS, "router"]))
    return str(ENGINE_DEFAULTS[engine]["release_base"])


def _of_host(host: str, service: str | None, profile: str | None, workspace: Any) -> Target:
    """Asks the host for its Python, glibc and driver."""
    from ddtree_ops.cli.fleet import select
    from ddtree_ops.deploy.fitting import fitting
    from ddtree_ops.deploy.session import open_session

    chosen = select([host], service, profile, workspace)
    if len(chosen) != 1:
        raise UsageError("--host: one host", hint=" | ".join(deployment.host.name for deployment in chosen))
    with open_session(chosen[0]) as session:
        return fitting(chosen[0], session.probe().system)
