"""``ddtree init``: a new workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops.cli.app import JsonOption, command
from ddtree_ops.cli.screen import Screen


@command("init")
def init(
    directory: Annotated[Path, typer.Argument(help="Where; made when it does not exist.")] = Path(),
    json_: JsonOption = False,
) -> int:
    """Make a workspace: inventories and profiles to edit. Existing files are never overwritten.

    Example: ddtree init fleet && cd fleet && ddtree render --host ct200
    """
    from ddtree_ops.model.init import init_workspace

    screen = Screen(json_=json_)
    made = init_workspace(directory)
    if screen.json:
        screen.document({"ok": True, "workspace": str(directory.resolve()), "files": [str(path) for path in made]})
    else:
        screen.say(f"workspace {directory.resolve()}: {len(made)} files under inventories/")
        screen.say("next: set address and host_key in inventories/<host>.yaml, then ddtree plan --host <host>")
    return 0
