"""The uvicorn server around the application: how it stops, and what happens when the step loop fails."""

from __future__ import annotations

import contextlib
import logging
import socket

import uvicorn
from starlette.types import ASGIApp

from .scheduler import Scheduler

log = logging.getLogger(__name__)

_GRACE_SECONDS = 1


class Server:
    """Serves until SIGTERM, SIGINT or a crash of the step loop."""

    def __init__(self) -> None:
        self._failure: str | None = None
        self._uvicorn: uvicorn.Server | None = None

    def crashed(self, reason: str) -> None:
        """Called by the step loop when it failed: the process is to end with a non-zero status."""
        self._failure = reason
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def serve_until_stopped(self, app: ASGIApp, scheduler: Scheduler, listener: socket.socket) -> int:
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
        self._uvicorn = _Uvicorn(config, scheduler)
        scheduler.start()
        # uvicorn raises the signal that ended it once more; the caller's handler turns it into SystemExit.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            self._uvicorn.run(sockets=[listener])
        scheduler.stop("the server has stopped")
        scheduler.join(timeout=0.5)
        if self._failure is not None:
            log.critical("exit: %s", self._failure)
            return 1
        if not self._uvicorn.started:
            log.critical("exit: the server did not start")
            return 1
        log.info("stopped")
        return 0


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("ready on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First, so that requests in flight get their abort and connections close within the grace period.
        self._scheduler.stop("the server is stopping")
        await super().shutdown(sockets)
