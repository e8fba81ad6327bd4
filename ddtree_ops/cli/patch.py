"""``ddtree patch``: work on the patches of SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.app import JsonOption, command, group
from ddtree_ops.cli.screen import Screen
from ddtree_ops.errors import Failed

if TYPE_CHECKING:
    from ddtree_ops.release.workflow import Stock

patch = group("patch", "Check, edit and refresh the patches of SGLang.")

BaseOption = Annotated[str, typer.Option("--base", help="Which patches: a directory below patches/.")]
PatchesOption = Annotated[
    Path | None, typer.Option("--patches", help="Another directory with series, patches and overlay/.")
]
SGLANG = "sglang-0.5.17"


@command("check", patch)
def check(base: BaseOption = SGLANG, patches: PatchesOption = None, json_: JsonOption = False) -> int:
    """Does the series apply exactly to the pinned wheels, say what it must, compile and lint?"""
    from ddtree_ops.release import Cache, workflow

    screen = Screen(json_=json_)
    directory = _directory(base, patches)
    faults = workflow.check(base, directory, Cache(), screen.progress)
    if screen.json:
        screen.document({"ok": not faults, "faults": faults})
    for fault in faults:
        screen.say(fault, "red")
    if not faults:
        screen.step(f"{directory}: sound")
    return 1 if faults else 0


@command("edit", patch)
def edit(
    tree: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Where (default: .local/BASE).")] = None,
    base: BaseOption = SGLANG,
    patches: PatchesOption = None,
    json_: JsonOption = False,
) -> None:
    """Unpack the patched engine under git: the stock wheel, a commit a patch, the overlay last."""
    from ddtree_ops.release import workflow
    from ddtree_ops.release.patchset import load_patchset

    screen = Screen(json_=json_)
    tree = tree or Path(".local") / base
    subjects = workflow.edit(_stock(base, screen), load_patchset(_directory(base, patches)), tree)
    if screen.json:
        screen.document({"ok": True, "tree": str(tree), "commits": subjects})
    screen.say(str(tree))
    for subject in subjects:
        screen.step(subject)


@command("refresh", patch)
def refresh(
    tree: Annotated[Path, typer.Argument(metavar="DIR", help="A tree that patch edit made.")],
    base: BaseOption = SGLANG,
    patches: PatchesOption = None,
    json_: JsonOption = False,
) -> None:
    """Write the tree's commits back to series, patches and overlay. What says the same as before stays as it is."""
    from ddtree_ops.release.refresh import refresh

    screen = Screen(json_=json_)
    directory = patches or _directory(base, None)
    done = refresh(_stock(base, screen), directory, tree)
    if screen.json:
        screen.document({"ok": True, "written": done.written, "removed": done.removed})
    for name in done.written:
        screen.say(f"written: {directory / name}")
    for name in done.removed:
        screen.say(f"removed: {directory / name}")
    if not done.written and not done.removed:
        screen.step("nothing to change")


def _directory(base: str, patches: Path | None) -> Path:
    from ddtree_ops.data import data_dir

    directory = patches or data_dir("patches") / base
    if not directory.is_dir():
        raise Failed(f"{directory}: there is no such directory")
    return directory


def _stock(base: str, screen: Screen) -> Stock:
    from ddtree_ops.release import Cache, locked_pythons, workflow

    return workflow.stock(base, locked_pythons(base)[-1], Cache(), screen.progress)
