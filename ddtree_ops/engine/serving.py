"""The uvicorn server around the application: how it stops, and what happens when the step loop fails."""

from __future__ import annotations

import logging
import signal
import socket
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

log = logging.getLogger(__name__)

_GRACE_SECONDS = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Loop(Protocol):
    """What runs beside the server: a Scheduler, or a Follower."""

    def start(self) -> None:
        """Begin, in a thread of its own."""

    def stop(self, reason: str) -> None:
        """End; returns at once."""

    def join(self, timeout: float) -> None:
        """Wait for the end, at most `timeout` seconds."""


class Server:
    """Serves until SIGTERM, SIGINT or a crash of the step loop."""

    def __init__(self) -> None:
        self._failure: str | None = None
        self._uvicorn: uvicorn.Server | None = None

    def crashed(self, reason: str) -> None:
        """Called by the step loop when it failed: the process is to end with a non-zero status.

        Not if it was told to stop before: then other ranks, told so too, are gone as they should.
        """
        if self._uvicorn is not None and self._uvicorn.should_exit:
            return
        self._failure = reason
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def serve_until_stopped(self, app: ASGIApp, loop: Loop, listener: socket.socket) -> int:
        """The exit code: 0 when told to stop, 1 after a crash. Requests in flight are aborted, not awaited."""
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        self._uvicorn = _Uvicorn(config, loop)
        loop.start()
        stopped, before = False, [signal.getsignal(number) for number in _SIGNALS]
        try:
            for number in _SIGNALS:
                signal.signal(number, _stop)
            # uvicorn has handlers of its own meanwhile, and raises the signal that ended it once more.
            self._uvicorn.run(sockets=[listener])
        except _Stopped:
            stopped = True
        finally:
            for number, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(number, handler)
        loop.stop("the server has stopped")
        loop.join(timeout=0.5)
        if self._failure is not None:
            log.critical("exit: %s", self._failure)
            return 1
        if not self._uvicorn.started and not stopped:
            log.critical("exit: the server did not start")
            return 1
        log.info("stopped")
        return 0


class _Stopped(BaseException):
    """It was told to stop."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # one is enough
    raise _Stopped


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, loop: Loop) -> None:
        super().__init__(config)
        self._loop = loop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("ready on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First, so that requests in flight get their abort and connections close within the grace period.
        self._loop.stop("the server is stopping")
        await super().shutdown(sockets)
