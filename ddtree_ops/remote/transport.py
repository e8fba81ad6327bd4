"""What the rest of the package sees of a host: run, popen, forward. ``connect`` picks ssh or local."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from ..errors import UsageError

#: Bytes of stdout or stderr that `Transport.run` collects before it gives up on the command.
OUTPUT_LIMIT = 64 << 20
#: Seconds for a TCP connection, and again for what ssh says first.
CONNECT_TIMEOUT_S = 10


class Endpoint(Protocol):
    """The part of an inventory's host that a transport reads (`ddtree_ops.model.Host` has it)."""

    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def user(self) -> str: ...
    @property
    def sudo(self) -> bool: ...
    @property
    def host_key(self) -> str | None: ...
    @property
    def known_hosts(self) -> str | None: ...
    @property
    def identity_file(self) -> str | None: ...


class Result(NamedTuple):
    """How a command ended. ``code`` is its exit status; when signal n killed it, 128 + n (local) or 255 (ssh)."""

    code: int
    stdout: bytes
    stderr: bytes


class Process(Protocol):
    """A command that runs while it is talked to. Methods may be called from several threads."""

    def write(self, data: bytes) -> None:
        """Sends to its stdin. Raises BrokenPipeError when it no longer reads, Unreachable when the link is lost."""

    def close_stdin(self) -> None:
        """Tells it that no more input comes; harmless when repeated."""

    def lines(self) -> Iterator[bytes]:
        """Its stdout line by line without the newline, until it ends. Raises Unreachable when the link is lost."""

    def wait(self, timeout: float | None = None) -> int:
        """Exit status as in `Result`. Raises TimeoutError, or Unreachable when the link is lost."""

    def stderr(self) -> bytes:
        """The last 64 KiB that it wrote to stderr so far."""

    def kill(self) -> None:
        """Ends it (local: SIGKILL to its process group; ssh: its pipes break). Harmless when it has ended."""


class Transport(Protocol):
    """One open way to one host."""

    @property
    def name(self) -> str:
        """The host's name in the inventory."""

    @property
    def user(self) -> str:
        """Who commands run as without ``root``."""

    @property
    def may_root(self) -> bool:
        """Whether ``root=True`` can work: the user is root, or the inventory says ``sudo: true``."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float | None = 60,
        root: bool = False,
        limit: int = OUTPUT_LIMIT,
    ) -> Result:
        """Runs a command to its end; stdin is sent while both outputs are read.

        ``root``: through ``sudo -n`` unless the user is root already. Raises Failed when it does not end within
        ``timeout`` seconds (it is then killed on the host) or writes more than ``limit`` bytes, Unreachable when the
        link is lost or root is not to be had. A status other than 0 is not an error here.
        """

    def ask(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = 60, root: bool = False) -> Result:
        """As `run`, for a command that changes nothing: it may run twice, and over a connection of its own."""

    def popen(self, argv: Sequence[str], *, root: bool = False) -> Process:
        """Starts a command and returns at once."""

    def forward(self, port: int) -> AbstractContextManager[str]:
        """Base URL ``http://127.0.0.1:NNNN`` that reaches 127.0.0.1:``port`` on the host while the block runs."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Closing:
    """What every `Transport` shares: leaving its block closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(host: Endpoint) -> Transport:
    """Opens the host's transport. Raises Unreachable with what to do about it, UsageError for an impossible entry."""
    if host.transport == "local":
        from .local import LocalTransport

        return LocalTransport(host)
    if host.transport == "ssh":
        from .ssh import SshTransport

        return SshTransport(host)
    raise UsageError(f"{host.name}: transport {host.transport!r}: allowed are ssh and local")


def connect_when_needed(host: Endpoint) -> Transport:
    """As `connect`, but an ssh host is dialled by what is first asked of it, which then raises what `connect` does."""
    if host.transport == "ssh":
        from .later import LaterTransport

        return LaterTransport(host)
    return connect(host)


def printable(output: bytes, limit: int = 2000) -> str:
    """The end of what a host said, as text that cannot steer a terminal: hosts are not trusted."""
    text = output.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.expandtabs())[-limit:].strip()
