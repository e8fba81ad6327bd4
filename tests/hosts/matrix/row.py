"""A row: what is done to a host and its client, and the end declared for it; running one, and what came of it."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from typing import Literal

from ..machine import HarnessError
from .world import RowFailed, World

End = Literal["new", "old", "untouched", "stopped"]


@dataclasses.dataclass(frozen=True)
class Row:
    """``act`` returns the client's exit code (negative: killed by that signal). ``code``: the one declared for it.

    ``end``: the new profile serves; the old one does; the old one, never restarted; nothing does (exit 9). ``mend``
    takes away what was in the way, before one more deploy must succeed, with ``again`` as further options. ``short``
    rows run in ``make test``. ``world``: scripted, or the reference engine.
    """

    name: str
    end: End
    code: int | None
    act: Callable[[World], int]
    mend: Callable[[World], object] = lambda world: None
    again: tuple[str, ...] = ()
    short: bool = False
    world: Literal["scripted", "reference"] = "scripted"


@dataclasses.dataclass(frozen=True)
class Result:
    """``ended``: whether as declared; ``why`` says how not."""

    row: str
    ended: bool
    why: str
    strays: list[str]
    seconds: float


def run_row(row: Row, world: World) -> Result:
    """Bring the host to its beginning, let the row happen, check its end, deploy once more, look for strays."""
    began = time.monotonic()
    why, strays = "", []
    try:
        world.ready()
        code = row.act(world)
        world.wait_settled() if row.end != "stopped" else None
        end = world.end()
        if end != row.end:
            raise RowFailed(f"ended {end} with exit {code}")
        if row.code is not None and code != row.code:
            raise RowFailed(f"exit {code} instead of {row.code}")
        row.mend(world)
        world.wait_settled()
        world.ddtree("deploy", "--profile", world.new, "--yes", "--no-snapshot", *row.again)
        if world.serves() != world.new:
            raise RowFailed(f"after one more deploy it is {world.serves()} that serves")
        plan = world.json("plan", "--profile", world.new)["hosts"][0]["plan"]
        if plan["action"] != "nothing" or plan["drift"]:
            raise RowFailed(f"after one more deploy the plan is not clean: {plan['reasons']}, {plan['drift']}")
        world.workspace.ddtree("verify-exactness", "--host", world.host.name) if row.world == "reference" else None
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
    return Result(row.name, not why, why[-2000:], strays, round(time.monotonic() - began, 1))
