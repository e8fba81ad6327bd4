"""Until a generation is confirmed only this machine reaches its port, where systemd can keep the others out.

systemd.resource-control(5), IPAddressDeny=: a BPF filter on the unit's cgroup. It is silently absent where the kernel
or a container does not allow it, so it counts only after a connection was seen refused. The filter is a drop-in below
/run: it is gone after a reboot, and `lift_guard` takes it off a running service without a restart.
"""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

from .base import JSON, HostError, make_dir, read_bytes, remove, run, safe, write_file
from .service import Service
from .supervisors import GUARD, RUNTIME_UNITS, Systemd

TRY = """
import socket, sys
server = socket.create_server(("0.0.0.0", 0))
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, server.getsockname()[1]), 1).close()
        print("reached", address)
    except OSError:
        print("refused", address)
"""


def own_addresses() -> list[str]:
    """This machine's addresses besides loopback, IPv4 first (a NUMA-local collective may speak through them)."""
    import ipaddress  # slow to import, and no question needs it

    table = (read_bytes(Path("/proc/net/fib_trie")) or b"").decode(errors="replace")
    found = set(re.findall(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL", table))
    four = sorted(address for address in found if not ipaddress.ip_address(address).is_loopback)
    lines = (read_bytes(Path("/proc/net/if_inet6")) or b"").decode(errors="replace").splitlines()
    six = {str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines}
    return four + sorted(address for address in six if not ipaddress.ip_address(address).is_loopback)


def cannot_guard(service: Service) -> str:
    """Why this host cannot keep others off a port; empty when a transient unit was just seen to refuse them."""
    if not isinstance(service.sup, Systemd):
        return "there is no systemd to enforce it"
    four = [address for address in own_addresses() if ":" not in address][:4]
    if not four:
        return "the host has no address of its own to try it at"
    deny = ["--property=IPAddressDeny=any", "--property=IPAddressAllow=localhost"]
    argv = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", *deny, "--", sys.executable, "-I", "-c", TRY]
    done = run([*argv, "127.0.0.1", *four], 20)
    said = done.stdout.split("\n")
    if done.returncode != 0 or "reached 127.0.0.1" not in said:
        return f"the try failed: {safe(done.stderr.strip()) or done.returncode}"
    if open_to := [address for address in four if f"refused {address}" not in said]:
        return f"IPAddressDeny= does not hold here: a connection to {', '.join(open_to)} was let through"
    return ""


def guard_path(service: Service) -> Path:
    return RUNTIME_UNITS / f"{service.name}.service.d" / GUARD


def place_guard(service: Service) -> None:
    """Before the unit is loaded: from its start on only this machine reaches the service."""
    path = guard_path(service)
    make_dir(path.parent)
    allowed = " ".join(["localhost", *own_addresses()])
    write_file(path, f"[Service]\nIPAddressDeny=any\nIPAddressAllow={allowed}\n".encode())


def lift_guard(service: Service) -> None:
    """Let others in again; nothing to do where there is no guard. Raises failed when systemd does not take it."""
    path = guard_path(service)
    if not isinstance(service.sup, Systemd) or not path.exists():
        return
    text = read_bytes(path) or b""
    remove(path)
    try:
        service.sup.systemctl("daemon-reload", timeout=90)
    except HostError:
        write_file(path, text)  # what is in force must stay visible, and the next one must find it
        raise
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def guard(service: Service, request: JSON) -> JSON:
    """Whether this host can keep others off a port that is not yet proven; starts one transient unit to see it."""
    why = cannot_guard(service)
    return {"able": not why, "why": why}


def try_lift_guard(service: Service) -> None:
    """After an end, which nothing may undo: a guard that stays is shown as drift and lifted by the next `recover`."""
    try:
        lift_guard(service)
    except (HostError, OSError) as error:
        print(f"ddtree-host: the guard stays: {error}", file=sys.stderr)
