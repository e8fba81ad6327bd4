"""``ddtree export``: a profile for Kubernetes or Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli import complete
from ddtree_ops.cli.app import JsonOption, ProfileOption, ServiceOption, WorkspaceOption, command, group
from ddtree_ops.cli.screen import Screen
from ddtree_ops.errors import UsageError

if TYPE_CHECKING:
    from ddtree_ops.model import Deployment

export = group("export", "Render a service for Kubernetes or Slurm.")

HostOption = Annotated[
    str | None,
    typer.Option("--host", help="Host of the inventory whose service it is.", autocompletion=complete.hosts),
]
PythonOption = Annotated[
    str | None, typer.Option("--python", help="The Python that the release is for (default: the newest locked).")
]
OutputOption = Annotated[Path | None, typer.Option("-o", "--output", help="Write it here instead of printing it.")]


@command("kubernetes", export)
def kubernetes(
    image: Annotated[str, typer.Option("--image", help="Has the installed release at ROOT/releases/ID.")],
    job_image: Annotated[str, typer.Option("--job-image", help="Has ddtree-ops, for the exactness and bench jobs.")],
    namespace: Annotated[str | None, typer.Option("--namespace")] = None,
    replicas: Annotated[int, typer.Option("--replicas", min=0)] = 1,
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    python: PythonOption = None,
    output: OutputOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """ConfigMap, Deployment and Service of a profile, exactness and bench as Jobs. Contacts nothing."""
    from ddtree_ops.export import Images
    from ddtree_ops.export import kubernetes as render

    deployment, release = _chosen(host, service, profile, python, workspace)
    text = render(deployment, release, Images(image, job_image), namespace=namespace, replicas=replicas)
    return _give(text, release, output, Screen(json_=json_))


@command("slurm", export)
def slurm(
    time: Annotated[str | None, typer.Option("--time", help="As sbatch takes it, such as 8:00:00.")] = None,
    partition: Annotated[str | None, typer.Option("--partition")] = None,
    account: Annotated[str | None, typer.Option("--account")] = None,
    host: HostOption = None,
    service: ServiceOption = None,
    profile: ProfileOption = None,
    python: PythonOption = None,
    output: OutputOption = None,
    workspace: WorkspaceOption = None,
    json_: JsonOption = False,
) -> int:
    """A batch script that starts a profile's engine, proves it, measures it and serves. Contacts nothing."""
    from ddtree_ops.export import Allocation
    from ddtree_ops.export import slurm as render

    deployment, release = _chosen(host, service, profile, python, workspace)
    text = render(deployment, release, Allocation(time, partition, account))
    return _give(text, release, output, Screen(json_=json_))


def _chosen(
    host: str | None, service: str | None, profile: str | None, python: str | None, workspace: Path | None
) -> tuple[Deployment, str]:
    """The deployment and the id of the release that it is for."""
    from ddtree_ops.cli.fleet import select
    from ddtree_ops.deploy.fitting import refuse_impossible, release_ids

    chosen = select(None if host is None else [host], service, profile, workspace)
    if len(chosen) != 1:
        raise UsageError("--host: one host", hint=" | ".join(deployment.host.name for deployment in chosen))
    refuse_impossible(chosen[0])
    if chosen[0].others:
        raise UsageError(
            f"{chosen[0].service_name} runs on several hosts, which is not exported",
            hint="export a profile that fits on one host",
        )
    ids = release_ids(chosen[0])
    if python is not None and python not in ids:
        raise UsageError(f"--python: not {python!r}", hint=", ".join(ids))
    return chosen[0], ids[list(ids)[-1] if python is None else python]


def _give(text: str, release: str, output: Path | None, screen: Screen) -> int:
    from ddtree_ops.cli.output import write_whole

    if output is not None:
        write_whole(output, text, "--output")
        screen.step(f"written to {output}; release {release}")
    if screen.json:
        screen.document({"ok": True, "release": release, "text": text})
    elif output is None:
        screen.say(text.removesuffix("\n"))
    return 0
