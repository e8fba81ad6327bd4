"""Talking to a command through pipes, whatever carries them: all at once (`drive`) or as it runs (`PipedProcess`)."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ..errors import Failed, Unreachable
from .transport import Result, printable

CHUNK = 1 << 16
STDERR_KEPT = 1 << 16
LONGEST_LINE = 4 << 20
# The host's own `timeout` ends a command that a cut link left behind; it comes after the client's.
HOST_TIMEOUT_LATER = 2


class Pipes(Protocol):
    """A started command. Reads answer b"" at the end; each method may run in its own thread."""

    def read(self, size: int) -> bytes: ...
    def read_stderr(self, size: int) -> bytes: ...
    def write(self, data: bytes) -> None: ...  # BrokenPipeError when nobody reads
    def close_stdin(self) -> None: ...
    def wait(self, timeout: float | None) -> int: ...  # TimeoutError; Unreachable when the link is lost
    def kill(self) -> None: ...


def host_argv(argv: Sequence[str], *, sudo: bool, timeout: float | None) -> list[str]:
    """What runs on the host for ``argv``: its own time limit inside sudo, so that root's processes end too."""
    words = list(argv)
    if timeout is not None:
        words = ["timeout", "--kill-after=2", f"{timeout + HOST_TIMEOUT_LATER:.0f}", *words]
    if sudo:
        words = ["sudo", "-n", "--", *words]
    return words


def require_argv(argv: Sequence[str]) -> None:
    """Refuses what no exec can carry. Raises ValueError: this is the caller's bug, not the operator's."""
    if not argv or any("\0" in word for word in argv):
        raise ValueError(f"not an argument vector: {argv!r}")


def drive(
    pipes: Pipes, stdin: bytes | Iterable[bytes], *, timeout: float | None, limit: int, host: str, argv: Sequence[str]
) -> Result:
    """Feeds and reads a command until it ends; see `Transport.run` for what is raised."""
    what = f"{host}: {shlex.join(argv)[:200]}"
    deadline = None if timeout is None else time.monotonic() + timeout
    over: list[str] = []
    broken: list[BaseException] = []

    def collect(read: Callable[[int], bytes], into: bytearray, name: str) -> None:
        while chunk := read(CHUNK):
            into += chunk
            if len(into) > limit:
                over.append(name)
                pipes.kill()
                return

    def feed() -> None:
        try:
            for chunk in [stdin] if isinstance(stdin, bytes) else stdin:
                try:
                    pipes.write(chunk)
                except (BrokenPipeError, Unreachable):
                    return  # it stopped reading, or the link is gone: its status or `wait` says which
            pipes.close_stdin()
        except BaseException as error:
            broken.append(error)
            pipes.kill()

    output, errors = bytearray(), bytearray()
    readers = [
        threading.Thread(target=collect, args=(pipes.read, output, "stdout"), daemon=True),
        threading.Thread(target=collect, args=(pipes.read_stderr, errors, "stderr"), daemon=True),
    ]
    try:
        for reader in readers:
            reader.start()
        if stdin == b"":
            pipes.close_stdin()
        else:
            threading.Thread(target=feed, daemon=True).start()
        for reader in readers:
            reader.join(_left(deadline))
        late = any(reader.is_alive() for reader in readers)
        code = None if late or over or broken else pipes.wait(_left(deadline))
    except TimeoutError:
        late, code = True, None
    except BaseException:
        pipes.kill()
        raise
    if broken:
        raise broken[0]
    if over:
        raise Failed(f"{what}: wrote more than {limit} bytes to {over[0]}")
    if late or code is None:
        pipes.kill()
        said = printable(bytes(errors)) or printable(bytes(output))
        raise Failed(f"{what}: did not end within {timeout:g} s", hint=f"it said: {said}" if said else "")
    return Result(code, bytes(output), bytes(errors))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class PipedProcess:
    """`transport.Process` over pipes. stderr is always drained, so a chatty command never stalls."""

    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes
        self._errors = bytearray()
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def _drain_stderr(self) -> None:
        while chunk := self._pipes.read_stderr(CHUNK):
            self._errors += chunk
            del self._errors[:-STDERR_KEPT]

    def write(self, data: bytes) -> None:
        self._pipes.write(data)

    def close_stdin(self) -> None:
        self._pipes.close_stdin()

    def lines(self) -> Iterator[bytes]:
        rest = b""
        while chunk := self._pipes.read(CHUNK):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
            if len(rest) > LONGEST_LINE:
                self.kill()
                raise Failed(f"a line of more than {LONGEST_LINE} bytes")
        if rest:
            yield rest
        # The end of the stream may be the end of the link, which `wait` tells. A command may also close stdout early.
        with contextlib.suppress(TimeoutError):
            self._pipes.wait(0.5)

    def wait(self, timeout: float | None = None) -> int:
        code = self._pipes.wait(timeout)
        self._drain.join(1)
        return code

    def stderr(self) -> bytes:
        return bytes(self._errors)

    def kill(self) -> None:
        self._pipes.kill()
