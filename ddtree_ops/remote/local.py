"""This machine as a host: subprocesses in sessions of their own, the same face as ssh."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from ..errors import Unreachable
from .process import PipedProcess, drive, host_argv, require_argv
from .transport import OUTPUT_LIMIT, Closing, Endpoint, Process, Result


class LocalTransport(Closing):
    """No link to lose; everything else as `transport.Transport` says."""

    def __init__(self, host: Endpoint) -> None:
        self.name, self.user = host.name, pwd.getpwuid(os.geteuid()).pw_name
        self._sudo = host.sudo and os.geteuid() != 0
        self.may_root = host.sudo or os.geteuid() == 0

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float | None = 60,
        root: bool = False,
        limit: int = OUTPUT_LIMIT,
    ) -> Result:
        return drive(self._start(argv, root, timeout), stdin, timeout=timeout, limit=limit, host=self.name, argv=argv)

    def ask(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = 60, root: bool = False) -> Result:
        return self.run(argv, stdin=stdin, timeout=timeout, root=root)

    def popen(self, argv: Sequence[str], *, root: bool = False) -> Process:
        return PipedProcess(self._start(argv, root, None))

    @contextlib.contextmanager
    def forward(self, port: int) -> Iterator[str]:
        yield f"http://127.0.0.1:{port}"

    def close(self) -> None:
        """Nothing is held open."""

    def _start(self, argv: Sequence[str], root: bool, timeout: float | None) -> LocalPipes:
        require_argv(argv)
        if root and not self.may_root:
            raise Unreachable(f"{self.name}: needs root", hint="run as root, or set sudo: true in its inventory")
        sudo = root and self._sudo
        # Only what sudo started needs a limit of its own: the rest is killed from here.
        return LocalPipes(host_argv(argv, sudo=sudo, timeout=timeout if sudo else None))


class LocalPipes:
    """A subprocess that leads its own session: Ctrl-C at this terminal does not reach it."""

    def __init__(self, argv: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            # As a shell says it, so that a caller reads 127 and 126 on any transport.
            code = 127 if isinstance(error, FileNotFoundError) else 126
            shell = ["sh", "-c", 'echo "$1" >&2; exit "$2"', "sh", f"{argv[0]}: {error.strerror}", str(code)]
            self._process = subprocess.Popen(
                shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr

    def read(self, size: int) -> bytes:
        return self._stdout.read(size) or b""

    def read_stderr(self, size: int) -> bytes:
        return self._stderr.read(size) or b""

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._stdin.write(view) :]

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def wait(self, timeout: float | None) -> int:
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
