"""``ddtree demo``: the whole story on this machine, without a GPU, leaving nothing running."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.app import JsonOption, command
from ddtree_ops.cli.screen import Screen


@command("demo")
def demo(
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=128, help="Held-out prompts a cell.")] = 16,
    json_: JsonOption = False,
) -> int:
    """Deploy the reference engine here, prove it exact, measure AR, chain and DDTree, and take it all down again."""
    from ddtree_ops.demo import run_demo

    screen = Screen(json_=json_)
    report = run_demo(screen, prompts)
    if screen.json:
        screen.document({"ok": True, **report.as_json()})
        return 0
    deployed = ["profile", "verdict", "tokens/step", "answers unlike AR's"]
    title = f"Deployed here in turn: the reference engine with the tiny pair, release {report.release}"
    screen.table(title, deployed, report.deployed(), "A planted fault writes the tree's mask rows by block_size.")
    note = f"{report.prompts} held-out prompts x 128 tokens, fp32, C=8. {report.seconds:.0f} s in all, nothing runs on."
    screen.table(
        "What each shape commits per step", ["shape", "tokens/step", "answers unlike AR's"], report.measured(), note
    )
    return 0
