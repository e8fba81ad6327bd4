"""A streaming POST over a kept HTTP/1.1 connection, on asyncio's protocols: what a load client needs and no more.

A general client costs more CPU a chunk than a server takes for one; at C=128 it would be what is measured. A chunk is
only searched for its count of tokens; JSON is parsed once a request, at its end.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ddtree_ops.httpclients import REUSED_FOR_S

_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
MAX_BUFFER = 64 << 20


class RequestFailed(Exception):
    """A request got no full answer; the message says what came instead."""


class Event(msgspec.Struct):
    """When a chunk came (time.monotonic), and the server's count of tokens by then."""

    at: float
    tokens: int


class Answer(msgspec.Struct):
    """A finished stream: ``sent`` and ``events`` by time.monotonic, ``body`` the last event's JSON.

    Of verify steps the body alone tells: SGLang adds them up when a request ends, and chunks before say nothing
    (tokenizer_manager.py of 0.5.17).
    """

    sent: float
    events: list[Event]
    body: dict[str, Any]

    @property
    def steps(self) -> int | None:
        """Verify steps; None without speculation."""
        told = self.body.get("meta_info", {}).get("spec_verify_ct")
        return told if isinstance(told, int) else None

    @property
    def commits(self) -> dict[int, int] | None:
        """Tokens committed -> how many steps did so; None where the server does not tell, or not of every step."""
        accepted = self.body.get("meta_info", {}).get("spec_correct_drafts_histogram")
        if not isinstance(accepted, list) or sum(accepted) != self.steps:
            return None
        return {drafts + 1: count for drafts, count in enumerate(accepted) if count}


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._answered = 0.0
        self._reset()

    def _reset(self) -> None:
        self._buffer, self._at, self._headers, self._status = bytearray(), 0, False, 0
        self._chunked, self._length = False, 0
        self._events: list[Event] = []
        self._pending = bytearray()
        self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("the server closed the connection" + (f": {exc}" if exc else ""))

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RequestFailed(why))

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent, and not to a server that is about to close for idleness."""
        fresh = time.monotonic() - self._answered < REUSED_FOR_S
        return fresh and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def post(self, head: bytes, body: bytes) -> Answer:
        """Send it and take the stream to its end. Raises RequestFailed."""
        if self._transport is None:
            raise RequestFailed("the connection is closed")
        self._reset()
        self._done = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._transport.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        self._answered = time.monotonic()
        try:
            last = msgspec.json.decode(self._last)
        except msgspec.MsgspecError as error:
            raise RequestFailed(f"the last event is no JSON: {error}") from error
        if not isinstance(last, dict) or "error" in last:
            raise RequestFailed(f"the server answered {self._last[:200].decode(errors='replace')}")
        return Answer(sent, self._events, last)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > MAX_BUFFER:
            self._fail(f"more than {MAX_BUFFER >> 20} MiB of answer")
            self.close()
            return
        try:
            self._take()
        except ValueError as error:
            self._fail(f"not HTTP: {error}")
            self.close()

    def _take(self) -> None:
        buffer = self._buffer
        if not self._headers:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(buffer[:end]).lower()
            status = _STATUS.match(bytes(buffer[:16]))
            if status is None:
                raise ValueError(bytes(buffer[:60]).decode(errors="replace"))
            self._status, self._headers, self._at = int(status[1]), True, end + 4
            self._chunked = b"transfer-encoding: chunked" in head
            if (length := re.search(rb"content-length: *(\d+)", head)) is not None:
                self._length = int(length[1])
        if not self._chunked:
            if len(buffer) - self._at >= self._length:
                self._end(bytes(buffer[self._at : self._at + self._length]))
            return
        while (line := buffer.find(b"\r\n", self._at)) >= 0:
            size = int(bytes(buffer[self._at : line]).partition(b";")[0], 16)
            if len(buffer) < line + 2 + size + 2:
                break
            if size == 0:
                self._end(b"")
                return
            self._piece(bytes(buffer[line + 2 : line + 2 + size]))
            self._at = line + 2 + size + 2
        if self._at > 1 << 16 or self._at == len(buffer):
            del buffer[: self._at]
            self._at = 0

    def _piece(self, piece: bytes) -> None:
        """Bytes of the body: server-sent events end with an empty line, and may be cut anywhere."""
        if self._status != 200:
            self._pending += piece
            return
        whole = self._pending + piece if self._pending else piece
        events = whole.split(b"\n\n")
        self._pending = bytearray(events.pop())
        now = time.monotonic()
        for event in events:
            if not event.startswith(b"data: ") or event == b"data: [DONE]":
                continue
            self._last = bytes(event[6:])
            count = _COUNT.search(event)
            if count is None:
                continue
            self._events.append(Event(now, int(count[1])))

    def _end(self, body: bytes) -> None:
        if self._status != 200:
            said = (bytes(self._pending) + body)[:300].decode(errors="replace")
            self._fail(f"the server answered {self._status}: {said}")
        elif self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Connections to one server, kept and taken in turn."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        auth = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST /generate HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{auth}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._idle: list[Connection] = []

    async def generate(self, body: dict[str, Any]) -> Answer:
        """One streamed request. Raises RequestFailed."""
        connection = await self._connection()
        answer = await connection.post(self._head, msgspec.json.encode({**body, "stream": True}))
        if connection.reusable:
            self._idle.append(connection)
        return answer

    async def _connection(self) -> Connection:
        while self._idle:
            if (kept := self._idle.pop()).reusable:
                return kept
            kept.close()
        try:
            _, made = await asyncio.get_running_loop().create_connection(Connection, self._host, self._port)
        except OSError as error:
            raise RequestFailed(f"no connection: {error.strerror or error}") from error
        return made

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
