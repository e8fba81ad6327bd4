"""The rows of what surrounds a deploy: drift, other histories, plan files, rights, host keys, who reaches the port."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from ..test_main_job import PORT, SERVICE
from .row import End, Row
from .scenes import told, tried
from .world import HOME, UNIT, World, edit_inventory

WRONG_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIzZzZzZzZzZzZzZzZzZzZzZzZzZzZzZzZzZzZzZzZzZ"

DRIFT = {
    "unit edited": (f"echo '# x' >>{UNIT}", "was edited on the host"),
    "drop-in added": (
        f"mkdir -p {UNIT}.d; echo '[Service]' >{UNIT}.d/50-x.conf",
        "50-x.conf was added by somebody else",
    ),
    "unit masked": (f"rm {UNIT}; ln -s /dev/null {UNIT}", "is masked"),
    "unit replaced by a link": (f"mv {UNIT} /root/x.service; ln -s /root/x.service {UNIT}", "was replaced by a link"),
    "unit gone": (f"rm {UNIT}", "is gone"),
    "service disabled": (f"systemctl disable -q {SERVICE}", "it would not start at boot"),
    "link added": (
        f"mkdir -p /etc/systemd/system/basic.target.wants; ln -s {UNIT} /etc/systemd/system/basic.target.wants/",
        "its links are",
    ),
    "environment edited": (
        f"echo 'A=b' >>$(ls -d {HOME}/generations/*/env | sort -V | tail -1)",
        "was edited or is gone",
    ),
}


def drift(kind: str) -> Row:
    edit, said = DRIFT[kind]

    def act(world: World) -> int:
        confirmed = world.state()["confirmed"]
        world.host.sh(
            edit.replace(
                f"$(ls -d {HOME}/generations/*/env | sort -V | tail -1)", f"{HOME}/generations/{confirmed}/env"
            )
        )
        world.host.sh("systemctl daemon-reload")
        shown = world.ddtree("plan", "--profile", world.new, code=3).stdout
        assert "drift: " in shown and said in shown, shown
        client = world.start()
        return client.wait()

    return Row(f"drift, {kind}", "untouched", 1, act, again=("--overwrite",), short=kind == "drop-in added")


def another_history() -> Row:
    """What runs came from a branch that this workspace does not have."""

    def act(world: World) -> int:
        git = world.workspace.git
        git("checkout", "-q", "-b", f"aside-{time.time_ns()}")
        git("commit", "-q", "--allow-empty", "-m", "Aside")
        world.ddtree("deploy", "--profile", world.new, "--yes", "--no-snapshot")
        git("checkout", "-q", "main")
        client = world.start("deploy", "--profile", world.old, "--yes", "--no-snapshot")
        code = client.wait()
        told(world, client.said(), "not in the history of yours")
        # What was refused is allowed in so many words; the row's own last deploy then is a plain one.
        world.ddtree("deploy", "--profile", world.old, "--yes", "--no-snapshot", "--overwrite")
        world.ddtree("deploy", "--profile", world.new, "--yes", "--no-snapshot")
        return code

    return Row("deployed before from another history", "new", 1, act)


# plan files


def plan_file(moved: bool) -> Row:
    def act(world: World) -> int:
        file = world.workspace.path.parent / f"{world.host.name}.plan"
        world.ddtree("plan", "--profile", world.new, "-o", str(file), code=3)
        if moved:
            world.ddtree("deploy", "--profile", world.new, "--yes", "--no-snapshot")
        argv = ["deploy", str(file), "--yes", "--no-snapshot"]
        done = world.workspace.ddtree(*argv, code=1 if moved else 0)
        if moved:
            told(world, done.stderr, "the host moved since the plan was made")
        return done.returncode

    if moved:
        return Row("a plan file, and the host moved", "new", 1, act)
    return Row("a plan file", "new", 0, act, short=True)


# who may, and to whom


def rights(name: str, user: str, sudo: bool, end: End, code: int) -> Row:
    def act(world: World) -> int:
        edit_inventory(world, user=user, sudo=sudo)
        return world.start().wait()

    def mend(world: World) -> None:
        edit_inventory(world, user="root", sudo=False)

    return Row(name, end, code, act, mend=mend)


def host_key(name: str, key: str | None, said: str) -> Row:
    def act(world: World) -> int:
        edit_inventory(world, host_key=key)
        client = world.start()
        code = client.wait()
        told(world, client.said(), said)
        return code

    def mend(world: World) -> None:
        edit_inventory(world, host_key=world.host.hostkey)

    return Row(name, "untouched", 6, act, mend=mend)


# who reaches what is not proven


def reached(world: World) -> bool:
    """From another machine than the host."""
    try:
        socket.create_connection((world.host.address, PORT), timeout=2).close()
    except OSError:
        return False
    return True


def guarded(what: str) -> Row:
    """The profile serves beyond the host: nobody else reaches it before it is confirmed, everybody after."""

    def act(world: World) -> int:
        wide = tried(world, "wide", bind="0.0.0.0", open="a closed network")
        assert "tried on the host" in world.ddtree("plan", "--profile", wide, code=3).stdout
        world.halt("health done")
        client = world.start("deploy", "--profile", wide, "--yes", "--no-snapshot")
        world.halted(client)
        assert not reached(world), "what is not proven is reached from outside"
        if what == "killed":
            client.kill()
        elif what == "power lost":
            world.host.powerloss()
            world.host.up()
            return client.wait()
        world.go_on()
        code = client.wait()
        if what == "confirmed":
            assert reached(world), "what is proven is not reached"
        return code

    end: End = "new" if what == "confirmed" else "old"
    code = {"confirmed": 0, "killed": -9, "power lost": 5}[what]
    return Row(f"an open port, guarded until confirm, {what}", end, code, act, short=what == "confirmed")


def surroundings() -> Iterator[Row]:
    for kind in DRIFT:
        yield drift(kind)
    yield another_history()
    for moved in (False, True):
        yield plan_file(moved)
    yield rights("sudo without a password", "deploy", True, "new", 0)
    yield rights("sudo with a password", "asks", True, "untouched", 6)
    yield rights("a user without sudo", "plain", True, "untouched", 6)
    yield rights("a user without sudo, and the inventory knows", "plain", False, "untouched", 6)
    yield host_key("an unknown host key", None, "host_key")
    yield host_key("a changed host key", WRONG_KEY, "SHA256:")
    for what in ("confirmed", "killed", "power lost"):
        yield guarded(what)
