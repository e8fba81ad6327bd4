"""A host over ssh that is dialled when there is something to say: the first question by ssh(1), all else by Fabric.

A no-op is one question. Importing Fabric and paramiko for it takes longer than all the rest (docs/speed.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from . import openssh
from .rights import may_root
from .transport import OUTPUT_LIMIT, Closing, Endpoint, Process, Result, Transport, connect


class LaterTransport(Closing):
    """`transport.Transport`. What `connect` raises is raised by the call that dials."""

    def __init__(self, host: Endpoint) -> None:
        self.name, self.user, self.may_root = host.name, host.user, may_root(host)
        self._host = host
        self._open: Transport | None = None
        self._dialling = threading.Lock()

    def ask(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = 60, root: bool = False) -> Result:
        if self._open is None:
            answer = openssh.ask(self._host, argv, stdin=stdin, timeout=timeout, root=root)
            if answer is not None:
                return answer
        return self._link().run(argv, stdin=stdin, timeout=timeout, root=root)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float | None = 60,
        root: bool = False,
        limit: int = OUTPUT_LIMIT,
    ) -> Result:
        return self._link().run(argv, stdin=stdin, timeout=timeout, root=root, limit=limit)

    def popen(self, argv: Sequence[str], *, root: bool = False) -> Process:
        return self._link().popen(argv, root=root)

    def forward(self, port: int) -> AbstractContextManager[str]:
        return self._link().forward(port)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    def _link(self) -> Transport:
        with self._dialling:
            if self._open is None:
                self._open = connect(self._host)
            return self._open
