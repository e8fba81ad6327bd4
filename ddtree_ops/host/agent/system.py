"""Processes, ports, and the server's HTTP, by the standard library."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .base import JSON, HostError, read_bytes, safe

if TYPE_CHECKING:
    from typing import Any


def glibc() -> str:
    with contextlib.suppress(ValueError, OSError):
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace("glibc ", "")
    return ""


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (proc(5), field 22); None when it is gone or a zombie."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if rest[0] in (b"Z", b"X") else int(rest[19])


def boot_id() -> str:
    return (read_bytes(Path("/proc/sys/kernel/random/boot_id")) or b"").decode().strip()


def pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield int(entry.name)


def kill_all(members: Callable[[], list[int]], patience: float = 10) -> None:
    """SIGKILL what ``members`` lists until it lists nothing; failed when something stays."""
    deadline = time.monotonic() + patience
    while left := members():
        if time.monotonic() > deadline:
            raise HostError("failed", f"processes of the service survive SIGKILL: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def listeners(port: int) -> set[str]:
    """Inodes of the sockets that listen on the port, on any address."""
    with contextlib.suppress(OSError, struct.error):
        return {str(inode) for family in (socket.AF_INET, socket.AF_INET6) for inode in _listening(family, port)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_bytes(Path(table), 32 << 20) or b"").decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _listening(family: int, port: int) -> set[int]:
    """`listeners` of one address family by sock_diag(7): /proc/net/tcp walks every connection there could be.

    Raises OSError where the kernel has no inet_diag or does not let us.
    """
    found: set[int] = set()
    # struct nlmsghdr (SOCK_DIAG_BY_FAMILY; NLM_F_REQUEST | NLM_F_DUMP), then struct inet_diag_req_v2: TCP_LISTEN only
    question = struct.pack("=LHHLL", 72, 20, 0x301, 1, 0)
    question += struct.pack("=BBBBL48x", family, socket.IPPROTO_TCP, 0, 0, 1 << 10)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.settimeout(2)
        kernel.sendto(question, (0, 0))
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind = struct.unpack_from("=LH", data)
                if kind == 3:  # NLMSG_DONE
                    return found
                if kind != 20 or length < 88:  # NLMSG_ERROR, or nothing we asked for
                    raise OSError(f"sock_diag answered {kind}")
                # struct inet_diag_msg: the port in network order at 4, the inode at 68
                if struct.unpack_from("!H", data, 16 + 4)[0] == port:
                    found.add(struct.unpack_from("=L", data, 16 + 68)[0])
                data = data[(length + 3) & ~3 :]


def port_owner(port: int, members: list[int]) -> JSON | None:
    """Who listens on the port: {"pid", "command", "ours"}; pid None where we may not see it; None when it is free."""
    sockets = {f"socket:[{inode}]" for inode in listeners(port)}
    if not sockets:
        return None
    for pid in (*members, *pids()):
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if str(Path(entry.path).readlink()) in sockets:
                    command = (read_bytes(Path(f"/proc/{pid}/comm")) or b"").decode(errors="replace").strip()
                    return {"pid": pid, "command": safe(command), "ours": pid in members}
    return {"pid": None, "command": "", "ours": False}


def http_get(port: int, path: str, token: str | None = None, timeout: float = 5) -> tuple[int, bytes]:
    """GET from loopback as HTTP/1.0: no proxy, no redirect, the body capped, all of it within ``timeout``.

    By hand, because a server that drips bytes must not keep the applier from its deadlines. Raises OSError, or
    ValueError when the answer is not HTTP.
    """
    deadline, data = time.monotonic() + timeout, b""
    key = f"Authorization: Bearer {token}\r\n" if token else ""
    # create_connection would load the codec of international names for it
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        sock.connect(("127.0.0.1", port))
        sock.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n{key}\r\n".encode())
        while True:
            head, found, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d{1,9})", head)
            if found and length and len(body) >= int(length[1]):
                break
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            chunk = sock.recv(1 << 16)
            if time.monotonic() > deadline or len(data) > 8 << 20:
                raise TimeoutError(f"no whole answer within {timeout:g} s and 8 MiB")
            if not chunk:
                break
            data += chunk
    status = re.match(rb"HTTP/1\.[01] (\d{3})\b", head)
    if not status:
        raise ValueError("the answer is not HTTP")
    return int(status[1]), body


def server_info(port: int, token: str | None, timeout: float = 5) -> JSON:
    """The server's resolved arguments. Raises HostError when it does not tell them."""
    problem = ""
    for path in ("/server_info", "/get_server_info"):
        try:
            code, body = http_get(port, path, token, timeout)
            info = json.loads(body) if code == 200 else None
        except Exception as error:  # whatever a server does is an answer, never our end
            problem = f"{path}: {type(error).__name__}: {error}"
            continue
        if isinstance(info, dict):
            return info
        problem = f"{path} answered {code}"
    raise HostError("failed", problem)


def same(want: Any, got: Any) -> bool:
    """JSON equality: absent equals null, 1 equals 1.0, true does not equal 1."""
    if isinstance(want, bool) or isinstance(got, bool):
        return want is got
    return bool(want == got)


def mismatches(expect: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    return [
        safe(f"{key}: wanted {json.dumps(want)}, got {json.dumps(info.get(key))}", cap=1000)
        for key, want in sorted(expect.items())
        if not same(want, info.get(key))
    ]
