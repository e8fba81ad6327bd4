"""``ddtree build``: a release from pins and patches."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.app import JsonOption, command
from ddtree_ops.cli.screen import Screen


@command("build", "Deploy")
def build(
    engine: Annotated[str, typer.Option("--engine", help="reference")] = "reference",
    arch: Annotated[str, typer.Option("--arch", help="GPU arch such as sm_120; none for the CPU engine.")] = "none",
    json_: JsonOption = False,
) -> int:
    """Make a release, print its id. The same inputs give the same id anywhere."""
    from ddtree_ops import release

    screen = Screen(json_=json_)
    made = release.build(engine, arch=arch, progress=screen.progress)
    size = made.manifest["total_size"]
    if screen.json:
        screen.document({"ok": True, "release": made.id, "files": len(made.manifest["files"]), "bytes": size})
    else:
        screen.say(made.id)
        screen.step(f"{len(made.manifest['files'])} files, {size / 1e6:.0f} MB")
    return 0
