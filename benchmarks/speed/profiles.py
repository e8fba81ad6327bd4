"""1,000 profiles in a workspace: all files read and checked, each profile resolved for a host and rendered.

python -m benchmarks.speed.profiles make DIR; python -m benchmarks.speed.profiles render DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from ddtree_ops.model import init_workspace, load_workspace, resolve
from ddtree_ops.units import render

COUNT = 1000
SERVICE = "sglang-k26-ddtree"


def make(folder: Path) -> None:
    init_workspace(folder)
    for n in range(COUNT):
        text = f"extends: b8k4\nbudget: {1 + n % 64}\ntopk: {1 + n % 8}\nenv:\n  RUN: 'number {n}'\n"
        (folder / f"inventories/profiles/p{n}.yaml").write_text(text)


def rendered(folder: Path) -> int:
    """How many different environments came of it: all of them are."""
    workspace = load_workspace(folder)
    found = [render(resolve(workspace, "ct200", SERVICE, f"p{n}"), "0" * 16, 1).files for n in range(COUNT)]
    return len({files["env"] for files in found})


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        print(rendered(Path(sys.argv[2])), "profiles")
