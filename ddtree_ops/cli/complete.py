"""What a shell completes: hosts, profiles, runs, topics. All are names of files; none is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def hosts(ctx: Any, incomplete: str) -> list[str]:
    """Hosts of the inventory, and ``all``. Typer calls it with click's context."""
    found = [path.stem for path in _inventory(ctx, "*.yaml") if path.stem != "workspace"]
    return _beginning(incomplete, [*found, "all"])


def profiles(ctx: Any, incomplete: str) -> list[str]:
    return _beginning(incomplete, [path.stem for path in _inventory(ctx, "profiles/*.yaml")])


def runs(ctx: Any, incomplete: str) -> list[str]:
    """Directories of runs, as sweep and tune name them: below ``sweeps/`` of the workspace."""
    found = [path.parent for folder in _folders(ctx) for path in folder.glob("sweeps/*/records.jsonl")]
    here = Path.cwd()
    shown = [str(path.relative_to(here)) if path.is_relative_to(here) else str(path) for path in found]
    return _beginning(incomplete, shown)


def topics(incomplete: str) -> list[str]:
    """Documents that ``ddtree help`` shows."""
    from ddtree_ops.data import data_dir

    return _beginning(incomplete, [path.stem for path in data_dir("docs").glob("*.md")])


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in sorted(set(names)) if name.startswith(incomplete)]


def _inventory(ctx: Any, pattern: str) -> list[Path]:
    return [path for folder in _folders(ctx) for path in folder.glob(f"inventories/{pattern}")]


def _folders(ctx: Any) -> Iterator[Path]:
    """The workspace that the command line so far means, as `model.find_workspace` finds it; none, where it is none."""
    said = ctx.params.get("workspace") or os.environ.get("DDTREE_WORKSPACE")
    here = Path.cwd()
    for folder in [Path(said)] if said else [here, *here.parents]:
        if (folder / "inventories").is_dir():
            yield folder
            return
