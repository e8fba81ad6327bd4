"""The rows that are a story of their own: bad releases, drift, ports, keys, rights, two clients, rollbacks, plans."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

from ..machine import wait_for
from ..test_main_job import FAULT, PORT, SERVICE
from .row import Row
from .world import HOME, MOMENT_S, UNIT, World, edit_inventory

LISTEN = "import socket,time; s=socket.create_server(('0.0.0.0',{port})); time.sleep(600)"
OTHER_PORT = PORT + 7
# A drafter of the right form that learned nothing: all of its weights are zero.
BLANK_DRAFTER = """
rm -rf /opt/blank-draft; cp -rL /opt/ddtree/releases/*/share/pair/draft /opt/blank-draft; chmod -R u+w /opt/blank-draft
python3 - <<'END'
with open("/opt/blank-draft/model.safetensors", "r+b") as file:
    head = int.from_bytes(file.read(8), "little")
    left = file.seek(0, 2) - 8 - head
    file.seek(8 + head)
    file.write(bytes(left))
END
"""


def tried(world: World, name: str, **keys: object) -> str:
    """A profile that is the new one and something more; its name."""
    world.workspace.profile(name, extends=world.new, **keys)
    return name


def deploys(profile: Callable[[World], str], *more: str) -> Callable[[World], int]:
    return lambda world: world.start("deploy", "--profile", profile(world), "--yes", "--no-snapshot", *more).wait()


def plain(*more: str) -> Callable[[World], int]:
    return deploys(lambda world: world.new, *more)


def told(world: World, client_said: str, *texts: str) -> None:
    for text in texts:
        assert text in client_said, f"{text!r} is not in: {client_said[-1500:]}"


# what is deployed is bad


def refused_by_the_gate(
    name: str, said: str, world_kind: str = "scripted", prepare: str = "true", **keys: object
) -> Row:
    """Back on the old one, which is proven again; evidence on the host and here. ``prepare`` runs there first."""

    def act(world: World) -> int:
        world.host.sh(prepare)
        before = set(world.evidence())
        client = world.start("deploy", "--profile", tried(world, "bad", **keys), "--yes", "--no-snapshot")
        code = client.wait()
        told(world, client.said(), said, "it answers: EXACT", "evidence: ", "evidence on the host: ")
        (kept,) = set(world.evidence()) - before
        evidence = json.loads(kept.read_text())
        assert evidence["end"]["event"] == "recovered" and evidence["journal"], evidence["end"]
        assert any(entry.get("gpus") for entry in evidence["journal"] if entry["step"] == "evidence"), "no GPUs' state"
        on_host = world.host.sh(f"ls {HOME}/generations/*/evidence/{evidence['txn']}").split()
        assert {"log.txt", "why.json"} <= set(on_host), on_host
        return code

    kind = "reference" if world_kind == "reference" else "scripted"
    return Row(name, "old", 5, act, world=kind, short=name == "healthy but wrong tokens, scripted")  # type: ignore[arg-type]


def crash_loop(kind: str) -> Row:
    """Healthy, and killed as often as it comes back."""

    def act(world: World) -> int:
        client = world.start()
        wait_for("the gate", lambda: "proving that it is exact" in client.said() or client.code() is not None, MOMENT_S)
        world.host.sh(f"kill -9 $(systemctl show -P MainPID {SERVICE})")
        return client.wait()

    return Row(f"healthy, then a crash loop, {kind}", "old", 5, act, world=kind)  # type: ignore[arg-type]


# what is there is in the way


def foreign_listener(world: World, port: int) -> None:
    world.host.sh(f'systemd-run --quiet --unit=foreign python3 -c "{LISTEN.format(port=port)}"')
    wait_for("the listener", lambda: f":{port}" in world.host.sh("ss -ltn"), 10)


def end_listener(world: World) -> None:
    world.host.sh("systemctl stop foreign")


def port_taken() -> Row:
    def act(world: World) -> int:
        foreign_listener(world, OTHER_PORT)
        set_port(world, OTHER_PORT)
        client = world.start()
        code = client.wait()
        told(world, client.said(), f"port {OTHER_PORT} is taken by python3")
        return code

    def mend(world: World) -> None:
        end_listener(world)
        set_port(world, PORT)

    return Row("the port is taken by a foreign process", "untouched", 1, act, mend=mend, short=True)


def set_port(world: World, port: int) -> None:
    services = {SERVICE: {"base": world.base, "profile": "b8k4", "port": port, "gpus": []}}
    edit_inventory(world, services=services)


def port_taken_in_between() -> Row:
    """Neither the new nor the old one can have it: a hand is needed, and the printed command is enough of one."""

    def act(world: World) -> int:
        world.halt("stop done")
        client = world.start()
        world.halted(client)
        foreign_listener(world, PORT)
        world.go_on()
        code = client.wait()
        told(world, client.said(), "the restore failed")
        world.workspace.path.with_suffix(".command").write_text(printed_command(client.said()))
        return code

    return Row(
        "the port is taken while nothing serves", "stopped", 9, act, mend=lambda world: by_hand(world, end_listener)
    )


def printed_command(said: str) -> str:
    return next(line.strip() for line in said.splitlines() if "ddtree-host recover" in line)


def by_hand(world: World, first: Callable[[World], object]) -> None:
    """What an operator does after exit 9: mend it, and run the command that was printed, as it was printed."""
    first(world)
    world.host.sh(world.workspace.path.with_suffix(".command").read_text())
    assert world.serves() == world.old, "the printed command did not bring the old one back"


def restore_fails() -> Row:
    def act(world: World) -> int:
        world.halt("gate begin")
        client = world.start()
        world.halted(client)
        world.host.sh(f"mv {HOME}/generations/{world.state()['confirmed']}/unit /root/unit.aside")
        client.interrupt()
        time.sleep(1)
        world.go_on()
        code = client.wait()
        world.workspace.path.with_suffix(".command").write_text(printed_command(client.said()))
        return code

    def put_back(world: World) -> None:
        world.host.sh(f"mv /root/unit.aside {HOME}/generations/{world.state()['confirmed']}/unit")

    return Row("the restore fails", "stopped", 9, act, mend=lambda world: by_hand(world, put_back), short=True)


def old_one_dead(bad: bool) -> Row:
    def act(world: World) -> int:
        world.host.sh(f"systemctl stop {SERVICE}")
        profile = tried(world, "bad", extra_args=["--script", "wrong"]) if bad else world.new
        return world.start("deploy", "--profile", profile, "--yes", "--no-snapshot").wait()

    if bad:
        return Row("the old service dead before a deploy that fails", "stopped", 5, act)
    return Row("the old service dead before a deploy", "new", 0, act)


def old_one_crashing() -> Row:
    """It kept failing when the deploy began; what is restored is started again."""

    def act(world: World) -> int:
        for _ in range(5):
            world.host.sh(f"systemctl kill -s KILL {SERVICE} || true; sleep 0.2; systemctl restart {SERVICE} || true")
        world.host.sh(f"systemctl kill -s KILL {SERVICE}; sleep 0.5")
        assert world.host.sh(f"systemctl show -P ActiveState {SERVICE}").strip() in ("failed", "activating")
        profile = tried(world, "bad", extra_args=["--script", "wrong"])
        return world.start("deploy", "--profile", profile, "--yes", "--no-snapshot").wait()

    return Row("the old service failing before a deploy that fails", "old", 5, act)


# rollback


def rollback(name: str, code: int, damage: str, said: str, again: tuple[str, ...] = ()) -> Row:
    """From the new one to the one before, after the ``damage``: the new one stays."""

    def act(world: World) -> int:
        before = world.state()["confirmed"]
        world.ddtree("deploy", "--profile", world.new, "--yes", "--no-snapshot")
        world.host.sh(damage.format(base=f"{HOME}/generations/{before}"))
        client = world.start("rollback", "--to", str(before), "--yes")
        found = client.wait()
        told(world, client.said(), said)
        return found

    return Row(f"rollback, {name}", "new", code, act, again=again)


def rollback_to_a_bad_one() -> Row:
    """The generation is whole and was never good."""

    def act(world: World) -> int:
        world.ddtree("deploy", "--profile", world.new, "--yes", "--no-snapshot")
        world.ddtree("deploy", "--profile", tried(world, "bad", extra_args=["--script", "wrong"]), "--yes", code=5)
        newest = max(map(int, world.host.sh(f"ls {HOME}/generations").split()))
        return world.start("rollback", "--to", str(newest), "--yes").wait()

    return Row("rollback, the target fails its gate", "new", 5, act)


# two at once


def two_clients(at_once: bool) -> Row:
    def act(world: World) -> int:
        if at_once:
            first, second = world.start(), world.start()
            codes = sorted((first.wait(), second.wait()))
            assert codes[0] == 0 and codes[1] in (0, 1, 7), (codes, first.said(), second.said())
            return 0
        world.halt("gate begin")
        first = world.start()
        world.halted(first)
        second = world.start()
        assert second.wait() == 7, second.said()
        told(world, second.said(), "is being deployed by", "deploy to generation")
        world.go_on()
        return first.wait()

    return Row(
        "two clients " + ("at the same moment" if at_once else "one after the other"), "new", 0, act, short=at_once
    )


SIGTERM_WAITS = f"""pid=$(systemctl show -p MainPID --value ddtree-apply-{SERVICE})
    grep -q '^ShdPnd:.*[4-7c-f]...$' /proc/$pid/status"""


def unlocked() -> Row:
    def act(world: World) -> int:
        world.halt("health begin")
        client = world.start()
        world.halted(client)
        other = world.start("unlock", "--reason", "lunch", "--yes")
        # The applier stands still, so the signal waits; a fixed sleep was too short on a busy machine.
        wait_for("the unlock's signal", lambda: world.host.run(["sh", "-c", SIGTERM_WAITS]).returncode == 0, MOMENT_S)
        world.go_on()
        assert other.wait() == 0, other.said()
        code = client.wait()
        told(world, client.said(), "told to stop by ", "unlocked: lunch")
        told(world, world.ddtree("history").stdout, "unlocked: lunch")
        return code

    return Row("unlocked by another", "old", 5, act)


def rebooted() -> Row:
    def act(world: World) -> int:
        world.halt("health begin")
        client = world.start()
        world.halted(client)
        world.go_on()
        world.host.sh("systemctl reboot")
        time.sleep(3)
        wait_for("the host to be back", lambda: world.host.leader and ssh_answers(world), MOMENT_S)
        world.host.up()
        assert world.host.run(["systemctl", "is-system-running", "--wait"]).stdout.strip() == b"running"
        return client.wait()

    return Row("reboot in mid-deploy", "old", 5, act)


def ssh_answers(world: World) -> bool:
    try:
        with socket.create_connection((world.host.address, 22), timeout=1) as link:
            return link.recv(4) == b"SSH-"
    except OSError:
        return False


def scenes() -> Iterator[Row]:
    yield refused_by_the_gate("never healthy", "not healthy within 1 s", "reference", load_timeout_s=1)
    yield refused_by_the_gate("healthy but wrong tokens", "FAIL", "reference", extra_args=["--fault", FAULT])
    yield refused_by_the_gate(
        "accept length 1.0", "accept length 1.00", "reference", prepare=BLANK_DRAFTER, drafter="/opt/blank-draft"
    )
    yield crash_loop("reference")
    yield refused_by_the_gate("healthy but wrong tokens, scripted", "FAIL", extra_args=["--script", "wrong"])
    yield refused_by_the_gate(
        "never healthy, scripted", "not healthy within", extra_args=["--script", "sick"], load_timeout_s=3
    )
    yield refused_by_the_gate("healthy, then dead, scripted", "the service ", extra_args=["--script", "die"])
    yield port_taken()
    yield port_taken_in_between()
    yield restore_fails()
    for bad in (False, True):
        yield old_one_dead(bad)
    yield old_one_crashing()
    yield rollback("the target is missing", 1, "rm -r {base}", "there is no generation")
    yield rollback("the target has no unit", 1, "rm {base}/unit", "has no unit")
    yield rollback("the target is damaged", 1, "echo '# x' >>{base}/unit", "was edited or is gone")
    edit = f"echo '# x' >>{UNIT}; systemctl daemon-reload"
    yield rollback("the unit was edited", 1, edit, "was edited on the host", ("--overwrite",))
    yield rollback_to_a_bad_one()
    for at_once in (False, True):
        yield two_clients(at_once)
    yield unlocked()
    yield rebooted()
