"""The rows of three hosts: looked at all at once, changed in order and width, stopped by the first that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..machine import wait_for
from ..test_main_job import PORT
from .row import Row
from .scenes import end_listener, foreign_listener
from .world import MOMENT_S, World


def rollout(world: World, *more: str) -> list[str]:
    return [*world.everywhere("deploy", world.new), *more]


def one_down(keep_going: bool) -> Row:
    """The middle one. Without --keep-going nothing at all is touched."""

    def act(world: World) -> int:
        world.others[0].down()
        client = world.start(*rollout(world, *(["--keep-going"] if keep_going else [])))
        code = client.wait()
        assert world.serves(world.others[1]) == (world.new if keep_going else world.old), client.said()
        return code

    def mend(world: World) -> None:
        world.others[0].up()

    if keep_going:
        return Row("one of three hosts down, the others go on", "new", 6, act, mend=mend, world="fleet")
    return Row("one of three hosts down", "untouched", 6, act, mend=mend, world="fleet")


def first_fails() -> Row:
    """Its port is taken: the other two are not touched."""

    def act(world: World) -> int:
        world.host.sh("systemctl stop sglang-k26-ddtree")
        foreign_listener(world, PORT)
        client = world.start(*rollout(world))
        code = client.wait()
        assert "not touched: " + ", ".join(host.name for host in world.others) in client.said(), client.said()
        assert {world.serves(host) for host in world.others} == {world.old}
        return code

    return Row("the first of three hosts fails", "stopped", 1, act, mend=end_listener, world="fleet")


def side_by_side(interrupted: bool) -> Row:
    """Two at a time; Ctrl-C brings all of them back and leaves the third alone."""

    def act(world: World) -> int:
        (world.workspace.path / "inventories" / "workspace.yaml").write_text("max_unavailable: 2\n")
        world.halt("health begin")
        client = world.start(*rollout(world))
        world.halted(client)
        second = world.others[0]
        state = f"{second.name}: waiting until it answers"
        wait_for("the second one to be at it too", lambda: state in client.said(), MOMENT_S)
        if interrupted:
            client.interrupt()
            time.sleep(1)
        world.go_on()
        code = client.wait()
        wanted = [world.new, world.new] if not interrupted else None
        served = [world.serves(host) for host in world.others]
        assert wanted in (None, served), (served, client.said())
        assert served[1] == world.new or (interrupted and served[1] == world.old), (served, client.said())
        (world.workspace.path / "inventories" / "workspace.yaml").unlink()
        return code

    if interrupted:
        return Row("two of three hosts at a time, interrupted", "old", 130, act, world="fleet")
    return Row("two of three hosts at a time", "new", 0, act, world="fleet")


def fleet() -> Iterator[Row]:
    for keep_going in (False, True):
        yield one_down(keep_going)
    yield first_fails()
    for interrupted in (False, True):
        yield side_by_side(interrupted)
