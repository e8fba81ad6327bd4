"""ssh(1) as a child process, held to what `ssh` holds Fabric to: no file of its own is read, the inventory says all.

It is there for what ends before paramiko would be imported, and for bulk. It never explains a failure: whoever uses it
goes on to Fabric, which refuses with the words an operator reads.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import Unreachable
from .knownhosts import allowed_keys
from .local import LocalPipes
from .process import drive, require_argv
from .rights import may_root, remote_command, require_root, require_sudo
from .transport import CONNECT_TIMEOUT_S, OUTPUT_LIMIT, Endpoint, Result, printable

#: Status of ssh(1) for a failure of its own.
OWN_FAILURE = 255
ALIAS = "ddtree"  # the name in the one-host file of known hosts
#: A path that no rule of ssh_config(5) reads as anything else: no blank, quote, token or variable.
PLAIN = re.compile(r"[A-Za-z0-9/._+=@,:-]+")
OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "GlobalKnownHostsFile=/dev/null",
    "UpdateHostKeys=no",
    "VerifyHostKeyDNS=no",
    "CheckHostIP=no",
    f"HostKeyAlias={ALIAS}",
    "PreferredAuthentications=publickey",
    "ForwardAgent=no",
    "ControlMaster=no",
    "ControlPath=none",
    "LogLevel=ERROR",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    # a dead link ends it after about 10 s, as `ssh` does
    "ServerAliveInterval=2",
    "ServerAliveCountMax=5",
    # Hosts with GPUs have AES in hardware: less than half the CPU of ChaCha20, which ssh(1) would take first.
    "Ciphers=^aes128-gcm@openssh.com",
)


class _Dialled(NamedTuple):
    """An ssh(1) that was started ``since`` (time.monotonic), and what it needs while it runs."""

    child: LocalPipes
    files: contextlib.ExitStack
    since: float

    def end(self) -> None:
        self.child.kill()
        self.files.close()


_running: set[_Dialled] = set()
_begun: dict[Hashable, _Dialled] = {}


@atexit.register
def _leave_none() -> None:
    """After Ctrl-C hosts that do not answer are not waited for; what asks them ends with us."""
    for dialled in [*_running, *_begun.values()]:
        dialled.end()


@contextlib.contextmanager
def ssh_words(host: Endpoint) -> Iterator[list[str] | None]:
    """``ssh`` and its options for the host, without the host itself, while the block runs.

    None where ssh(1) is not to be had, or where it could not be held to the inventory's rule.
    """
    program, keys = shutil.which("ssh"), allowed_keys(host)
    # An identity or the agent, never both and never the files in ~/.ssh.
    identity = str(Path(host.identity_file).expanduser()) if host.identity_file else "none"
    only = ["IdentitiesOnly=yes", "IdentityAgent=none"] if host.identity_file else []
    there = os.access(identity, os.R_OK) if host.identity_file else True
    if program is None or not keys or not there or not PLAIN.fullmatch(identity):
        yield None
        return
    with tempfile.NamedTemporaryFile("w", prefix="ddtree-known-", suffix=".tmp") as known:
        if not PLAIN.fullmatch(known.name):
            yield None
            return
        known.write("".join(f"{ALIAS} {key}\n" for key in keys))
        known.flush()
        options = [*OPTIONS, f"UserKnownHostsFile={known.name}", f"IdentityFile={identity}", *only]
        yield [
            *(program, "-F", "none", "-T", "-x", "-l", host.user, "-p", str(host.port)),
            *(word for option in options for word in ("-o", option)),
        ]


class Carrier:
    """Bulk by ssh(1): OpenSSH encrypts several times as fast as paramiko. Every command dials for itself."""

    def __init__(self, host: Endpoint) -> None:
        self._host = host

    def run(self, argv: Sequence[str], *, stdin: bytes | Iterable[bytes], timeout: float | None) -> Result:
        """As `Transport.run`. Raises Unreachable when ssh(1) failed, at whatever: the caller knows another way."""
        result = ask(self._host, argv, stdin=stdin, timeout=timeout, root=False)
        if result is None:
            raise Unreachable(f"{self._host.name}: the connection to {self._host.address} is lost")
        return result


def carrier(host: Endpoint) -> Carrier | None:
    """None where ssh(1) is not to be had, or not to be held to the inventory's rule."""
    with ssh_words(host) as words:
        return None if words is None else Carrier(host)


def begin(host: Endpoint, argv: Sequence[str], *, timeout: float | None, root: bool) -> None:
    """Start connecting for an `ask` with these very arguments that will come: what is slow here passes beside it."""
    dialled = _dial(host, argv, timeout, root) if may_root(host) or not root else None
    if dialled is not None:
        _begun[_key(host, argv, timeout, root)] = dialled


def _key(host: Endpoint, argv: Sequence[str], timeout: float | None, root: bool) -> Hashable:
    return host.name, host.address, host.port, host.user, tuple(argv), timeout, root


def _dial(host: Endpoint, argv: Sequence[str], timeout: float | None, root: bool) -> _Dialled | None:
    """ssh(1) with the command, waiting for its stdin; None where `ssh_words` is."""
    with contextlib.ExitStack() as stack:
        words = stack.enter_context(ssh_words(host))
        if words is None:
            return None
        since = time.monotonic()
        child = LocalPipes([*words, "--", host.address, remote_command(host, argv, root=root, timeout=timeout)])
        return _Dialled(child, stack.pop_all(), since)


def ask(
    host: Endpoint,
    argv: Sequence[str],
    *,
    stdin: bytes | Iterable[bytes],
    timeout: float | None,
    root: bool,
    limit: int = OUTPUT_LIMIT,
) -> Result | None:
    """As `Transport.ask`, over a connection of its own. None: ask again by Fabric, which knows what is wrong.

    Raises Unreachable only for a host that let the whole time for a connection pass: once is enough to wait.
    """
    require_argv(argv)
    if root:
        require_root(host)
    dialled = _begun.pop(_key(host, argv, timeout, root), None) or _dial(host, argv, timeout, root)
    if dialled is None:
        return None
    _running.add(dialled)
    with dialled.files:
        try:
            result = drive(dialled.child, stdin, timeout=timeout, limit=limit, host=host.name, argv=argv)
        finally:
            _running.discard(dialled)
    if result.code != OWN_FAILURE:
        require_sudo(host, result, root)
        return result
    if time.monotonic() - dialled.since >= CONNECT_TIMEOUT_S:
        where = f"{host.user}@{host.address}:{host.port}"
        raise Unreachable(f"{host.name}: no connection to {where}: {printable(result.stderr) or 'it does not answer'}")
    return None
