"""The rows of issue "as fast as one round trip": who runs against whom, and the bound each must keep."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .fleet import Fleet
from .timing import Case, says
from .venvs import CHECKOUT, venv

PEERS = Path(__file__).parent / "peers"
SOURCES = {"PYTHONPATH": str(CHECKOUT)}


@dataclass(frozen=True)
class Row:
    """``ours`` is raced against ``theirs``; ``bounds``: name of theirs -> the largest ratio of ours to it."""

    name: str
    what: str
    ours: Case
    theirs: list[Case]
    bounds: dict[str, float]


def start() -> Iterator[Row]:
    """What an operator waits for before a host is asked anything."""
    python = str(venv("ddtree") / "python")
    typer = Case("import typer", [[python, "-c", "import typer"]])
    ddtree = [python, "-m", "ddtree_ops.cli"]
    completing = {"_DDTREE_COMPLETE": "complete_bash", "COMP_WORDS": "ddtree pl", "COMP_CWORD": "1"}
    for name, words, more, shown in (
        ("help", ["--help"], {}, "verify-exactness"),
        ("version", ["--version"], {}, "ddtree "),
        ("completion", [], completing, "plan"),
    ):
        ours = Case(f"ddtree {' '.join(words) or 'pl<TAB>'}", [[*ddtree, *words]], None, SOURCES | more, says(shown))
        yield Row(name, f"`{ours.name}`", ours, [typer], {typer.name: 1.6})


def render() -> Iterator[Row]:
    """1,000 profiles resolved, rendered, checked; against one second, by a case that sleeps for it."""
    python = str(venv("ddtree") / "python")
    folder = Path(tempfile.mkdtemp(prefix="ddtree-profiles-"))
    argv = [python, "-m", "benchmarks.speed.profiles"]
    environment = {**os.environ, **SOURCES}
    subprocess.run([*argv, "make", str(folder)], cwd=CHECKOUT, env=environment, check=True, stdout=subprocess.DEVNULL)
    ours = Case("1,000 profiles", [[*argv, "render", str(folder)]], CHECKOUT, SOURCES, says("1000 profiles"))
    second = Case("one second", [["sleep", "1"]])
    yield Row(
        "profiles", "reading, checking and rendering 1,000 profiles, whole process", ours, [second], {second.name: 1}
    )


def one(fleet: Fleet) -> Iterator[Row]:
    """A no-op on one host, beside what its peers need for theirs."""
    host = fleet.hosts[0]
    ssh = Case("ssh host true", [ssh_true(fleet, 0)])
    fabric = Case(
        "Fabric: connect, run true, close",
        [[str(venv("fabric") / "python"), str(PEERS / "fabric_true.py"), host.address, str(host.identity_file)]],
    )
    peers = [fabric, pyinfra(fleet), ansible(fleet), ssh]
    bounds = {fabric.name: 1.5, "pyinfra": 1 / 3, "ansible": 1 / 6}
    yield Row("plan", "`ddtree plan`, nothing to change", ddtree(fleet, "plan", "--host", host.name), peers, bounds)
    deploy = ddtree(fleet, "deploy", "--yes", "--host", host.name)
    yield Row("deploy", "`ddtree deploy`, nothing to change", deploy, peers, bounds)


def ten(fleet: Fleet) -> Iterator[Row]:
    """A no-op on all hosts, beside as many ssh(1) at once."""
    count = len(fleet.hosts)
    plain = Case(f"{count} x ssh host true at once", [ssh_true(fleet, n) for n in range(count)])
    for verb in (["plan"], ["deploy", "--yes"], ["status"]):
        ours = ddtree(fleet, *verb, "--host", "all")
        yield Row(
            f"{verb[0]}-{count}", f"`ddtree {verb[0]} --host all`, {count} hosts", ours, [plain], {plain.name: 1.5}
        )


def ddtree(fleet: Fleet, *words: str) -> Case:
    """The command in the fleet's workspace. Its output must say of every host that there is nothing to do."""
    environment = {**SOURCES, "COLUMNS": "200", "XDG_CACHE_HOME": str(fleet.cache)}
    wanted = {"plan": "nothing to change", "deploy": "nothing to change", "status": "EXACT"}[words[0]]
    count = len(fleet.hosts) if "all" in words else 1

    def check(said: str) -> None:
        if said.count(wanted) < count:
            raise SystemExit(f"{words}: not {count} times {wanted!r} in:\n{said[-3000:]}")

    argv = [str(venv("ddtree") / "python"), "-m", "ddtree_ops.cli", *words]
    return Case(f"ddtree {' '.join(words)}", [argv], fleet.directory, environment, check)


def ssh_true(fleet: Fleet, number: int) -> list[str]:
    """One OpenSSH client, a connection of its own."""
    host = fleet.hosts[number]
    return ["ssh", *fleet.ssh_options(host), f"root@{host.address}", "true"]


def pyinfra(fleet: Fleet) -> Case:
    """Five idempotent operations; its own ssh, the same host key."""
    host, inventory = fleet.hosts[0], fleet.directory.parent / "pyinfra_inventory.py"
    data = {
        "ssh_user": "root",
        "ssh_key": str(host.identity_file),
        "ssh_known_hosts_file": str(host.known_hosts),
        "ssh_strict_host_key_checking": "yes",
    }
    inventory.write_text(f"hosts = [({host.address!r}, {data!r})]\n")
    argv = [str(venv("pyinfra") / "pyinfra"), "-y", str(inventory), str(PEERS / "pyinfra_deploy.py")]
    return Case("pyinfra", [argv], fleet.directory.parent, {"NO_COLOR": "1"}, says("No changes"), once_before(argv))


def ansible(fleet: Fleet) -> Case:
    """Five idempotent tasks: no facts, pipelining, forks, its own multiplexed ssh kept open between runs."""
    host, folder = fleet.hosts[0], fleet.directory.parent
    (folder / "hosts.ini").write_text(
        f"{host.name} ansible_host={host.address} ansible_user=root ansible_ssh_private_key_file={host.identity_file} "
        "ansible_python_interpreter=/usr/bin/python3\n"
    )
    environment = {
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_FORKS": "10",
        "ANSIBLE_GATHERING": "explicit",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_HOME": str(folder / "ansible"),
        "ANSIBLE_SSH_ARGS": f"-C -o ControlMaster=auto -o ControlPersist=60s -o UserKnownHostsFile={host.known_hosts}",
    }
    argv = [
        str(venv("ansible") / "ansible-playbook"),
        "-i",
        str(folder / "hosts.ini"),
        str(PEERS / "ansible_play.yaml"),
    ]
    return Case("ansible", [argv], folder, environment, says("changed=0"), once_before(argv, environment))


def once_before(argv: list[str], environment: dict[str, str] | None = None) -> Callable[[], None]:
    """The first time makes the changes; all that is timed has none."""
    done: list[bool] = []

    def before() -> None:
        if not done:
            done.append(True)
            subprocess.run(argv, env={**os.environ, **(environment or {})}, capture_output=True, check=True)

    return before


def manifest() -> dict[str, object]:
    """Where this ran, as far as it matters for ratios."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "argv": json.dumps(sys.argv[1:])}
