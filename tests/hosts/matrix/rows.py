"""The rows whose moments are exact: the client killed or interrupted, the link cut, the power lost, the disk full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ..test_main_job import SERVICE
from .row import End, Row
from .world import Client, World, cut

STEPS = ("accept", "generation", "verify-unit", "stop", "switch", "start", "health", "gate", "confirm")
MOMENTS = tuple(f"{step} {event}" for step in STEPS for event in ("begin", "done"))
BEFORE_STOP = MOMENTS[: MOMENTS.index("stop begin")]
DECIDED = MOMENTS[MOMENTS.index("gate done") :]
"""From here on the verdict is on the host: whatever becomes of the client, it confirms."""
# Every durable write of a deploy, in order. `the writes` fails when a deploy writes anything else.
WRITES = (
    "journal.jsonl #1",
    "service.json #1",
    ".reserve #1",
    f".{SERVICE}.service.reserve #1",
    "state.json #1",
    "journal.jsonl #2",
    "journal.jsonl #3",
    "env #1",
    "process.json #1",
    "profile.json #1",
    "unit #1",
    "generation.json #1",
    "journal.jsonl #4",
    "journal.jsonl #5",
    "journal.jsonl #6",
    "journal.jsonl #7",
    "journal.jsonl #8",
    "journal.jsonl #9",
    f"{SERVICE}.service #1",
    "journal.jsonl #10",
    "journal.jsonl #11",
    "journal.jsonl #12",
    "journal.jsonl #13",
    "journal.jsonl #14",
    "journal.jsonl #15",
    "journal.jsonl #16",
    "journal.jsonl #17",
    "verdict.json #1",
    "state.json #2",
    "journal.jsonl #18",
    "journal.jsonl #19",
)


def at(moment: str, then: Callable[[World, Client], None]) -> Callable[[World], int]:
    """Deploy the new profile, stop the applier at the moment, do ``then``, let it go on; the client's exit code."""

    def act(world: World) -> int:
        world.halt(moment)
        client = world.start()
        world.halted(client)
        if moment == "gate begin":  # the client is at its gate, and not past it
            time.sleep(0.1)
        then(world, client)
        return client.wait()

    return act


def killed(moment: str) -> Row:
    def then(world: World, client: Client) -> None:
        client.kill()
        world.go_on()

    end: End = "new" if moment in DECIDED else "old"
    return Row(f"client killed at {moment}", end, -9, at(moment, then), short=moment == "gate done")


def interrupted(moment: str) -> Row:
    def then(world: World, client: Client) -> None:
        client.interrupt()
        time.sleep(1)
        world.go_on()

    # At "accept begin" the client is still handing the plan over: it tells the host to go back when that is done.
    early = moment in BEFORE_STOP and moment != "accept begin"
    end: End = "new" if moment in DECIDED else "untouched" if early else "old"
    code = 0 if moment in DECIDED else 130
    return Row(f"client interrupted at {moment}", end, code, at(moment, then), short=moment == "start done")


def cut_for(moment: str, seconds: float | None) -> Row:
    """``seconds`` None: until the client has given up."""

    def act(world: World) -> int:
        world.halt(moment)
        client = world.start()
        world.halted(client)
        with cut(world):
            world.go_on()
            if seconds is None:
                return client.wait()
            time.sleep(seconds)
        return client.wait()

    name = "for ever" if seconds is None else f"for {seconds:g} s"
    end: End = "new" if seconds is not None or moment in DECIDED else "old"
    return Row(
        f"link cut {name} at {moment}",
        end,
        6 if seconds is None else 0,
        act,
        short=(moment, seconds) == ("start done", 1),
    )


def power_lost(moment: str) -> Row:
    def act(world: World) -> int:
        world.halt(moment)
        client = world.start()
        world.halted(client)
        world.host.powerloss()
        world.host.up()
        return client.wait()

    confirmed = moment == "confirm done"
    end: End = "new" if confirmed else "old"
    code = 0 if confirmed else 1 if moment in BEFORE_STOP else 5
    return Row(f"power lost at {moment}", end, code, act, short=moment == "switch done")


def disk_full(write: str) -> Row:
    def act(world: World) -> int:
        world.halt(f"write {write}")
        client = world.start()
        world.halted(client)
        world.fill()
        world.go_on()
        return client.wait()

    # A line may still fit into the journal's last block, so the first write that fails is this one or one after it.
    confirmed = WRITES.index(write) > WRITES.index("state.json #2")
    end: End = "new" if confirmed else "kept"
    code = 0 if confirmed else None
    return Row(f"disk full at {write}", end, code, act, mend=World.unfill, short=write == "state.json #1")


def all_writes() -> Row:
    def act(world: World) -> int:
        world.host.sh("touch /run/ddtree-writes")
        client = world.start()
        code = client.wait()
        found = world.host.sh("cat /run/ddtree-writes; rm /run/ddtree-writes").replace("write ", "").splitlines()
        assert tuple(found) == WRITES, found
        return code

    return Row("the writes of a deploy are those whose rows there are", "new", 0, act)


def moments() -> Iterator[Row]:
    for moment in MOMENTS:
        yield killed(moment)
        yield interrupted(moment)
        yield power_lost(moment)
    for step in STEPS:
        for seconds in (1, 10, None):
            yield cut_for(f"{step} begin", seconds)
    yield cut_for("start done", 1)
    yield all_writes()
    for write in WRITES:
        yield disk_full(write)
