"""A port of the host's loopback on this machine's loopback, through an open ssh connection (RFC 4254, direct-tcpip)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

import paramiko

from .channel import end_input

CHUNK = 1 << 16
JOIN_S = 10


class Forwarder:
    """``with Forwarder(dial) as local_port``. Any number of connections at once; all end with the block.

    ``dial(peer)`` opens a channel to the host's port for a connection from ``peer``.
    """

    def __init__(self, dial: Callable[[tuple[str, int]], paramiko.Channel]) -> None:
        self._dial = dial
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="forward", daemon=True)

    def __enter__(self) -> int:
        self._acceptor.start()
        port: int = self._listener.getsockname()[1]
        return port

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close alone does not
        self._listener.close()
        with self._guard:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(JOIN_S)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        """One connection; the client sees it closed when the host does not answer on that port."""
        with self._guard:
            self._open.add(connection)
        try:
            with connection:
                try:
                    channel = self._dial(peer)
                except (paramiko.SSHException, OSError, EOFError):
                    return
                back = threading.Thread(target=_to_client, args=(channel, connection), daemon=True)
                back.start()
                _to_host(connection, channel)
                back.join()
                with contextlib.suppress(OSError, EOFError):
                    channel.close()
        finally:
            with self._guard:
                self._open.discard(connection)


def _to_host(connection: socket.socket, channel: paramiko.Channel) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while chunk := connection.recv(CHUNK):
            channel.sendall(chunk)
        end_input(channel)


def _to_client(channel: paramiko.Channel, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := channel.recv(CHUNK):
            connection.sendall(chunk)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
