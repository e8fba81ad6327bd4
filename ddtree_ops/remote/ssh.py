"""A host over ssh: one Fabric connection, commands on raw channels of it (3 ms each instead of Fabric's 13-44).

Nothing of ~/.ssh/config, known_hosts or Fabric's own files is read: the inventory says everything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection  # type: ignore[import-untyped]

from ..errors import Failed, Unreachable
from .channel import end_input
from .forward import Forwarder
from .hostkeys import RefuseUnknown, add_expected, changed
from .process import PipedProcess, drive, require_argv
from .rights import may_root, remote_command, require_root, require_sudo
from .transport import CONNECT_TIMEOUT_S, OUTPUT_LIMIT, Closing, Endpoint, Process, Result

# tcp(7): unacknowledged data or unanswered keepalives end the connection after this.
DEAD_LINK_MS = 10_000
KEEPALIVE_IDLE_S = 3
KEEPALIVE_EVERY_S = 2
WINDOW = 8 << 20
# tcp(7): bytes the kernel takes ahead of the link. Few, or a cut loses megabytes that counted as sent.
AHEAD = 64 << 10
SESSION_WAIT_S = 5
# Without a handler of its own, what paramiko logs and then raises would also be printed on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshTransport(Closing):
    """`transport.Transport` over ssh. One connection; commands may run on it from several threads."""

    def __init__(self, host: Endpoint) -> None:
        self.name, self.user = host.name, host.user
        self._host = host
        self.may_root = may_root(host)
        self._connection = _open(host)
        self._transport: paramiko.Transport = self._connection.transport
        self._opening = threading.Lock()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float | None = 60,
        root: bool = False,
        limit: int = OUTPUT_LIMIT,
    ) -> Result:
        pipes = self._start(argv, root, timeout)
        result = drive(pipes, stdin, timeout=timeout, limit=limit, host=self.name, argv=argv)
        require_sudo(self._host, result, root)
        return result

    def ask(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = 60, root: bool = False) -> Result:
        return self.run(argv, stdin=stdin, timeout=timeout, root=root)

    def popen(self, argv: Sequence[str], *, root: bool = False) -> Process:
        return PipedProcess(self._start(argv, root, None))

    @contextlib.contextmanager
    def forward(self, port: int) -> Iterator[str]:
        target = ("127.0.0.1", port)
        with Forwarder(lambda peer: self._open_channel("direct-tcpip", target, peer)) as local_port:
            yield f"http://127.0.0.1:{local_port}"

    def close(self) -> None:
        self._connection.close()

    def _start(self, argv: Sequence[str], root: bool, timeout: float | None) -> _ChannelPipes:
        require_argv(argv)
        if root:
            require_root(self._host)
        command = remote_command(self._host, argv, root=root, timeout=timeout)
        try:
            channel = self._session()
            channel.exec_command(command)
        except paramiko.ChannelException as error:
            raise Failed(
                f"{self.name}: sshd refuses another session: {error.text}", hint="see MaxSessions in its sshd_config"
            ) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._lost() from error
        return _ChannelPipes(channel, self._transport, self._lost())

    def _session(self) -> paramiko.Channel:
        """A new session; waits a little when sshd has as many as it allows (MaxSessions, 10): some may be ending."""
        deadline = time.monotonic() + SESSION_WAIT_S
        while True:
            try:
                return self._open_channel("session")
            except paramiko.ChannelException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _open_channel(
        self, kind: str, to: tuple[str, int] | None = None, peer: tuple[str, int] | None = None
    ) -> paramiko.Channel:
        """Raises ChannelException when sshd refuses, SSHException or EOFError when the link is lost."""
        # paramiko keeps one exception a transport: of two refusals at once, one would read like a lost link.
        with self._opening:
            return self._transport.open_channel(
                kind, dest_addr=to, src_addr=peer, window_size=WINDOW, timeout=CONNECT_TIMEOUT_S
            )

    def _lost(self) -> Unreachable:
        return Unreachable(f"{self.name}: the connection to {self._host.address} is lost")


def _or_end(receive: Callable[[int], bytes], size: int) -> bytes:
    """What came, or the end: a read asks for more first, which fails where the link is gone, and ``wait`` says that."""
    try:
        return receive(size)
    except EOFError:
        return b""


class _ChannelPipes:
    """A command on an ssh channel."""

    def __init__(self, channel: paramiko.Channel, transport: paramiko.Transport, lost: Unreachable) -> None:
        self._channel, self._transport, self._lost = channel, transport, lost

    def read(self, size: int) -> bytes:
        return _or_end(self._channel.recv, size)

    def read_stderr(self, size: int) -> bytes:
        return _or_end(self._channel.recv_stderr, size)

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except (OSError, EOFError) as error:  # paramiko's word for a connection that ended is EOFError
            self._require_link()
            raise BrokenPipeError("the command no longer reads") from error

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            end_input(self._channel)

    def wait(self, timeout: float | None) -> int:
        if not self._channel.status_event.wait(timeout):
            raise TimeoutError
        # A dead link looks like the end of the command, even like a good one when the status came before the output.
        if not self._channel.eof_received or self._channel.exit_status == -1:
            self._require_link()
        return 255 if self._channel.exit_status == -1 else self._channel.exit_status

    def kill(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    def _require_link(self) -> None:
        # paramiko ends the channels first and notes the end of its transport a moment later.
        self._transport.join(0.3)
        if not self._transport.is_active():
            raise self._lost


def _open(host: Endpoint) -> Any:
    """The open Fabric connection."""
    arguments: dict[str, object] = {"allow_agent": True, "look_for_keys": False, "banner_timeout": CONNECT_TIMEOUT_S}
    if host.identity_file:
        identity = Path(host.identity_file).expanduser()
        if not os.access(identity, os.R_OK):
            raise Unreachable(f"{host.name}: identity_file {identity} cannot be read")
        arguments |= {"key_filename": [str(identity)], "allow_agent": False}
    # lazy, and a given (empty) ssh_config: Fabric reads none of its files and none of ssh's.
    config = Config(lazy=True, ssh_config=paramiko.SSHConfig())
    connection = Connection(host.address, user=host.user, port=host.port, config=config, connect_kwargs=arguments)
    # Connection's own policy adds any key it meets.
    connection.client.set_missing_host_key_policy(RefuseUnknown(host))
    add_expected(host, connection.client.get_host_keys())
    where = f"{host.user}@{host.address}:{host.port}"
    try:
        sock = _dial(host.address, host.port)
    except OSError as error:
        raise Unreachable(f"{host.name}: no connection to {where}: {error.strerror or error}") from error
    connection.connect_kwargs["sock"] = sock
    try:
        connection.open()
    except BaseException as error:
        connection.client.close()
        sock.close()
        refusal = _refusal(host, where, error)
        if refusal is None:
            raise
        raise refusal from error
    return connection


def _refusal(host: Endpoint, where: str, error: BaseException) -> Unreachable | None:
    """What a failed opening means to an operator; None for what is no failure of the connection."""
    if isinstance(error, paramiko.BadHostKeyException):
        return changed(host, error.key, error.expected_key)
    if isinstance(error, paramiko.PasswordRequiredException):
        return Unreachable(
            f"{host.name}: {host.identity_file} has a passphrase", hint="load it into ssh-agent and drop identity_file"
        )
    if isinstance(error, paramiko.AuthenticationException):
        offered = host.identity_file or "the keys in ssh-agent"
        return Unreachable(f"{host.name}: {where} does not accept {offered}: {error}")
    if isinstance(error, (paramiko.SSHException, OSError, EOFError)):
        return Unreachable(f"{host.name}: no ssh with {where}: {str(error) or 'the connection was closed'}")
    return None


def _dial(address: str, port: int) -> socket.socket:
    """A TCP connection that notices a dead link within about DEAD_LINK_MS. Raises OSError."""
    sock = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_USER_TIMEOUT", DEAD_LINK_MS),
        ("TCP_NOTSENT_LOWAT", AHEAD),
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_EVERY_S),
        ("TCP_KEEPCNT", DEAD_LINK_MS // 1000 // KEEPALIVE_EVERY_S),
    ):
        if hasattr(socket, option):  # not every system has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
