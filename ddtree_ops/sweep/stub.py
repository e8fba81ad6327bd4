"""A server that answers streams as fast as it can, to find the load client's own ceiling: no model behind it.

``python -m ddtree_ops.sweep.stub STEP_MS``: prints its port, ends with its stdin. Each request gets its
``max_new_tokens`` in chunks of CHUNK tokens, every chunk in SGLang's shape with all ids so far. With a STEP_MS above 0
a chunk comes each so many milliseconds, and with text: then it is the clients' counting that is compared.
"""

from __future__ import annotations

import asyncio
import json
import sys

CHUNK = 4


class _Stub(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET "):
            self._buffer = b""
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._buffer = b""
        task = asyncio.get_running_loop().create_task(self._answer(json.loads(body)))
        task.add_done_callback(lambda done: done.exception())

    async def _answer(self, asked: dict[str, dict[str, int]]) -> None:
        limit = asked["sampling_params"]["max_new_tokens"]
        self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        loop = asyncio.get_running_loop()
        began = loop.time()
        for step, (tokens, chunk) in enumerate(_chunks(limit), start=1):
            if _step_s:
                await asyncio.sleep(began + step * _step_s - loop.time())
            if self._transport.is_closing():
                return
            self._transport.write(chunk)
            if tokens < limit:
                await asyncio.sleep(0)
        self._transport.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")


_step_s = float(sys.argv[1]) / 1000 if __name__ == "__main__" else 0.0
_made: dict[int, list[tuple[int, bytes]]] = {}


def _chunks(limit: int) -> list[tuple[int, bytes]]:
    if limit not in _made:
        counts = [*range(1, limit, CHUNK), limit]
        _made[limit] = [(count, _framed(_event(count, step, count == limit))) for step, count in enumerate(counts)]
    return _made[limit]


def _event(tokens: int, steps: int, last: bool) -> bytes:
    text = {"text": " word" * tokens} if _step_s else {}
    meta = {"id": "stub", "finish_reason": None, "completion_tokens": tokens}
    if last:  # as SGLang does
        meta["spec_verify_ct"] = steps
    event = {**text, "output_ids": list(range(1000, 1000 + tokens)), "meta_info": meta}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
