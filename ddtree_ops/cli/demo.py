"""``ddtree demo``: the whole story on this machine, without a GPU, leaving nothing running."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.app import JsonOption, command
from ddtree_ops.cli.screen import Screen


@command("demo", "Start")
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
    for line in report.headline():
        screen.say(line)
    screen.table("", report.columns(), report.rows(), report.caption())
    return 0
