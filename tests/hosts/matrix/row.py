"""A row: what is done to a host and its client, and the end declared for it; running one, and what came of it."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from typing import Literal

from ..machine import HarnessError
from .world import RowFailed, World

End = Literal["new", "old", "untouched", "kept", "stopped"]


@dataclasses.dataclass(frozen=True)
class Row:
    """``act`` returns the client's exit code (negative: killed by that signal). ``code``: the one declared for it.

    ``end``: the new profile serves; the old one does; the old one, never restarted; the old one, whether restarted or
    not, and the exit code says truly which (``kept``); nothing does. ``mend`` takes away what was in the way, before
    one more deploy must succeed, with ``again`` as further options. ``short`` rows run in ``make test``. ``world``: one
    host with the scripted engine, one with the reference engine, or three hosts with the scripted one.
    """

    name: str
    end: End
    code: int | None
    act: Callable[[World], int]
    mend: Callable[[World], object] = lambda world: None
    again: tuple[str, ...] = ()
    short: bool = False
    world: Literal["scripted", "reference", "fleet"] = "scripted"


@dataclasses.dataclass(frozen=True)
class Result:
    """``ended``: whether as declared; ``why`` says how not."""

    row: str
    ended: bool
    why: str
    strays: list[str]
    seconds: float


WHY_CHARS = 3000
"""Of what is kept of a row that did not end as declared."""


def run_row(row: Row, world: World) -> Result:
    """Bring the host to its beginning, let the row happen, check its end, deploy once more, look for strays."""
    began = time.monotonic()
    why, strays = "", []
    try:
        world.ready()
        code = row.act(world)
        if row.code != 9:
            world.wait_settled()
        end, declared = world.end(), row.code
        if row.end == "kept" and end in ("old", "untouched"):
            end, declared = "kept", 5 if end == "old" else 1
        if end != row.end:
            raise RowFailed(f"ended {end} with exit {code}")
        if declared is not None and code != declared:
            raise RowFailed(f"exit {code} instead of {declared}")
        row.mend(world)
        world.wait_settled()
        world.ddtree("deploy", "--profile", world.new, "--yes", "--no-snapshot", *row.again)
        if world.serves() != world.new:
            raise RowFailed(f"after one more deploy it is {world.serves()} that serves")
        plan = world.json("plan", "--profile", world.new)["hosts"][0]["plan"]
        if plan["action"] != "nothing" or plan["drift"]:
            raise RowFailed(f"after one more deploy the plan is not clean: {plan['reasons']}, {plan['drift']}")
        if row.world == "reference":
            world.ddtree("verify-exactness")
    except (RowFailed, HarnessError, AssertionError, OSError, ValueError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
    except Exception:
        why = traceback.format_exc()
    world.end_clients()
    try:
        strays = world.strays()
    except (HarnessError, OSError, ValueError) as error:
        why = why or f"looking for strays: {error}"
    world.old, world.new = world.new, world.old
    world.clean = not why and not strays
    if len(why) > WHY_CHARS:  # what was wrong stands at the head, how it came to it at the end
        why = f"{why[: WHY_CHARS // 3]}\n[...]\n{why[-2 * WHY_CHARS // 3 :]}"
    return Result(row.name, not why, why, strays, round(time.monotonic() - began, 1))
