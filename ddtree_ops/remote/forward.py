"""A port of the host's loopback on this machine's loopback, through an open ssh connection (RFC 4254, direct-tcpip)."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

import paramiko

CHUNK = 1 << 16
OPEN_TIMEOUT_S = 10
WINDOW = 2 << 20


class Forwarder:
    """``with Forwarder(transport, port) as local_port``. Any number of connections at once; all end with the block."""

    def __init__(self, transport: paramiko.Transport, port: int) -> None:
        self._transport, self._port = transport, port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name=f"forward-{port}", daemon=True)

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
        self._acceptor.join(OPEN_TIMEOUT_S)

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
                target = ("127.0.0.1", self._port)
                try:
                    channel = self._transport.open_channel(
                        "direct-tcpip", target, peer, window_size=WINDOW, timeout=OPEN_TIMEOUT_S
                    )
                except (paramiko.SSHException, OSError, EOFError):
                    return
                with channel:
                    back = threading.Thread(target=_to_client, args=(channel, connection), daemon=True)
                    back.start()
                    _to_host(connection, channel)
                    back.join()
        finally:
            with self._guard:
                self._open.discard(connection)


def _to_host(connection: socket.socket, channel: paramiko.Channel) -> None:
    with contextlib.suppress(OSError, EOFError):
        while chunk := connection.recv(CHUNK):
            channel.sendall(chunk)
        channel.shutdown_write()


def _to_client(channel: paramiko.Channel, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := channel.recv(CHUNK):
            connection.sendall(chunk)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
