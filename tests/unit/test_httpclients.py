"""A server closes what was idle for some seconds; no client of ours sends a request at that moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from ddtree_ops import httpclients
from ddtree_ops.sweep.wire import Client

IDLE_S = 2.6
"""The worst server that must be lived with: what reaches it on a connection idle for longer gets no answer."""
EVENT = b'data: {"output_ids": [1], "meta_info": {"completion_tokens": 1}}\n\n'


class Closing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.last = time.monotonic()
        self.server.connections += 1  # type: ignore[attr-defined]

    def answer(self) -> None:
        if time.monotonic() - self.last > IDLE_S:
            self.close_connection = True
            return
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT))
        self.last = time.monotonic()

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def closing() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Closing)
    server.connections = 0  # type: ignore[attr-defined]
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def asked(url: str) -> None:
    """Twice at once, and once more after the pause, by each client."""
    raw = Client(url)
    with httpclients.blocking(url, None, timeout_s=10) as blocking:
        async with httpclients.concurrent(url, None, connections=4) as concurrent:
            for pause in (0, 0, IDLE_S + 0.1):
                await asyncio.sleep(pause)
                assert blocking.get("/").status_code == 200
                assert (await concurrent.get("/")).status_code == 200
                assert (await raw.generate({})).body["output_ids"] == [1]
    raw.close()


def test_a_connection_is_used_again_but_not_after_it_was_idle(closing: ThreadingHTTPServer) -> None:
    asyncio.run(asked(f"http://127.0.0.1:{closing.server_port}"))
    assert closing.connections == 6  # type: ignore[attr-defined]
