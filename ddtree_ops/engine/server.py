"""HTTP in SGLang's shapes: routes over a Service. Errors are {"error": {message, field, code}}."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .replies import Reply
from .schema import Call, Item, RequestError, parse_body, parse_generate
from .service import Progress, Service

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
_HEALTH_GENERATE_SECONDS = 20.0


def create_app(service: Service) -> Starlette:
    """The ASGI application of one service."""
    routes = Routes(service)
    both = ["GET", "POST"]
    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/health_generate", routes.health_generate),
            Route("/generate", routes.generate, methods=["POST", "PUT"]),
            Route("/abort_request", routes.abort_request, methods=["POST"]),
            Route("/model_info", routes.model_info),
            Route("/get_model_info", routes.model_info),
            Route("/server_info", routes.server_info),
            Route("/get_server_info", routes.server_info),
            Route("/flush_cache", routes.flush_cache, methods=both),
            Route("/metrics", routes.metrics),
        ],
        middleware=[Middleware(_BearerKey, key=service.api_key)] if service.api_key else [],
        exception_handlers={
            RequestError: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _broken,
        },
    )


def create_follower_app() -> Starlette:
    """What another rank than 0 answers: GET /health is 200. As with SGLang, whoever asks for more is not served."""

    async def health(_request: Request) -> Response:
        return Response()

    return Starlette(routes=[Route("/health", health)], exception_handlers={HTTPException: _http_error})


class Routes:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: Request) -> Response:
        """200 while the step loop is alive; it proves nothing about tokens."""
        reason = self._service.unhealthy()
        return Response() if reason is None else error_response(503, reason)

    async def health_generate(self, _request: Request) -> Response:
        """200 when one token really came out of the engine within 20 s."""
        if (reason := self._service.unhealthy()) is not None:
            return error_response(503, reason)
        item = Item(f"HEALTH_CHECK_{id(_request)}", [0], 1, frozenset(), None)
        try:
            async with asyncio.timeout(_HEALTH_GENERATE_SECONDS):
                reply = (await self._collect(Call([item], True, False, False)))[0]
        except TimeoutError:
            return error_response(503, f"no token within {_HEALTH_GENERATE_SECONDS:.0f} s")
        return Response() if reply.failure is None else error_response(503, reply.failure)

    async def generate(self, request: Request) -> Response:
        """SGLang's /generate."""
        body = parse_body(await _read_body(request))
        # Tokenizing megabytes would hold up every other connection.
        call = await asyncio.to_thread(parse_generate, body, self._service.limits)
        if call.stream:
            return _EventStream(call, self._service.submit(call))
        collecting = asyncio.create_task(self._collect(call))
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientDisconnect
            replies = await collecting
        finally:
            leaving.cancel()
            collecting.cancel()
        if (failure := next((r.failure for r in replies if r.failure is not None), None)) is not None:
            return error_response(500, failure)
        rendered = [reply.render() for reply in replies]
        return JSONResponse(rendered[0] if call.single else rendered)

    async def abort_request(self, request: Request) -> Response:
        """SGLang's /abort_request: {"rid": ...} or {"abort_all": true}. 200 also for a rid that is not in flight."""
        body = parse_body(await _read_body(request))
        if body.get("abort_all") is True:
            self._service.scheduler.abort_all("aborted by /abort_request")
        elif isinstance(rid := body.get("rid"), str) and rid:
            self._service.scheduler.abort(rid, "aborted by /abort_request")
        else:
            raise RequestError("rid", "must be a request's id, or abort_all must be true")
        return Response()

    async def model_info(self, _request: Request) -> Response:
        """SGLang's /model_info."""
        return JSONResponse(self._service.model_info())

    async def server_info(self, _request: Request) -> Response:
        """SGLang's /server_info; unlike SGLang's it never holds the api key."""
        return JSONResponse(self._service.server_info())

    async def flush_cache(self, _request: Request) -> Response:
        """Forget the prefix cache; as in SGLang 400 while requests run."""
        if not self._service.scheduler.flush():
            running, queued, _ = self._service.scheduler.load()
            return error_response(400, f"cache not flushed: {running} requests run and {queued} wait")
        return PlainTextResponse("Cache flushed.\n")

    async def metrics(self, _request: Request) -> Response:
        """Prometheus text."""
        return Response(self._service.metrics.render(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _collect(self, call: Call) -> list[Reply]:
        progress = self._service.submit(call)
        try:
            async for _ in progress:
                pass
        finally:
            progress.abandon()
        return progress.replies


class _EventStream(StreamingResponse):
    """Server-sent events of a call, ended with [DONE]; a client that leaves ends the call."""

    def __init__(self, call: Call, progress: Progress) -> None:
        self._call, self._progress = call, progress
        super().__init__(self._events(), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator: it may be cancelled before its first line runs.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._progress.abandon()

    async def _events(self) -> AsyncIterator[str]:
        async for index, reply in self._progress:
            yield _event(self._call, index, reply)
        yield "data: [DONE]\n\n"


class _BearerKey:
    """Every route but /health wants `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                await error_response(401, "Authorization: Bearer KEY is missing or wrong")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def error_response(status: int, message: str, field: str | None = None) -> JSONResponse:
    """An error in the shape that every route uses."""
    return JSONResponse({"error": {"message": message, "field": field, "code": status}}, status_code=status)


def _event(call: Call, index: int, reply: Reply) -> str:
    if reply.failure is not None:
        content: dict[str, Any] = {"error": {"message": reply.failure, "field": None, "code": 500}}
    else:
        content = reply.render() if call.single else {"index": index, **reply.render()}
    return f"data: {json.dumps(content)}\n\n"


async def _read_body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise RequestError(None, f"the body exceeds {MAX_BODY_BYTES} bytes", 413)
        chunks.append(chunk)
    return b"".join(chunks)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error.status, str(error), error.field)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    # Nobody reads this; 499 is what proxies log for it.
    return Response(status_code=499)


async def _broken(_request: Request, error: Exception) -> Response:
    log.error("a request failed inside the server", exc_info=error)
    return error_response(500, f"{type(error).__name__} inside the server; see its log")
