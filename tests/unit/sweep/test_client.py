"""Given servers that answer well, badly, in crumbs or not at all, the client counts what they said and no more."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ddtree_ops.sweep import cell
from ddtree_ops.sweep.ceiling import ceilings, stub
from ddtree_ops.sweep.figures import repeat_of
from ddtree_ops.sweep.grid import Load
from ddtree_ops.sweep.load import Hung, Sample, drive
from ddtree_ops.sweep.wire import Connection, RequestFailed
from ddtree_ops.sweep.workload import PromptSet

PROMPTS = PromptSet("p", tuple((n, n + 1) for n in range(16)))


def go(url: str, load: Load, limit_s: float = 20) -> list[object]:
    return list(asyncio.run(drive(url, PROMPTS, load, limit_s=limit_s)))


def test_every_request_is_answered_in_full_at_any_c() -> None:
    with stub() as url:
        for concurrency, requests in ((1, 5), (8, 40), (128, 384)):
            load = Load(concurrency, "p", 33, requests, 1)
            samples = asyncio.run(drive(url, PROMPTS, load, limit_s=20))
            found = repeat_of(samples, concurrency, None, closed=True)
            assert found.tokens == 33 * requests and len(found.rows) == requests
            # 1 token from the prefill, then 8 steps of 4
            assert found.accept_length == 4.0 and set(found.commits) == {4}
            assert found.in_flight <= concurrency + 1e-6


@pytest.mark.alone
def test_requests_that_begin_apart_do_not_end_together() -> None:
    with stub(step_ms=20) as url:  # 8 steps and the prefill: 180 ms a request
        for apart_s in (0.0, 0.18):
            samples = asyncio.run(drive(url, PROMPTS, Load(4, "p", 33, 12, 1), limit_s=20, apart_s=apart_s))
            ends = sorted(sample.answer.events[-1].at for sample in samples)
            gaps = [b - a for a, b in itertools.pairwise(ends)]
            assert statistics.median(gaps) > 0.03 if apart_s else statistics.median(gaps) < 0.02


@pytest.mark.alone
def test_passes_after_the_first_begin_over_a_requests_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    async def noted(*args: Any, apart_s: float, **options: Any) -> list[Sample]:
        seen.append(apart_s)
        return await drive(*args, apart_s=apart_s, **options)

    monkeypatch.setattr(cell, "drive", noted)
    with stub(step_ms=20) as url:
        cell.measure_cell(url, Load(2, "p", 33, 4, 1), PROMPTS, eos=None, pass_limit_s=20)
    assert seen[0] == 0.0 and len(seen) >= 3
    assert seen[1:] == pytest.approx([0.18] * (len(seen) - 1), rel=0.3)


@pytest.mark.alone
def test_open_arrivals_do_not_wait_for_answers() -> None:
    with stub() as url:
        load = Load(1, "p", 9, 30, 1, rate=300.0)
        samples = asyncio.run(drive(url, PROMPTS, load, limit_s=20))
    sent = sorted(sample.answer.sent for sample in samples)
    assert 30 / (sent[-1] - sent[0]) == pytest.approx(300, rel=0.6)


def test_the_clients_own_ceiling_is_told_for_each_c() -> None:
    found = ceilings([1, 8], 64)
    assert set(found) == {1, 8} and all(tokens > chunks > 0 for tokens, chunks in found.values())


@contextmanager
def server(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> Iterator[str]:
    """A server whose every connection is handled by ``answer``."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    port: list[int] = []

    async def main() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)  # type: ignore[misc]
            writer.close()

        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        port.append(listening.sockets[0].getsockname()[1])
        ready.set()

    loop.create_task(main())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def event(tokens: int, steps: int | None = None) -> bytes:
    meta: dict[str, object] = {"completion_tokens": tokens}
    meta |= {} if steps is None else {"spec_verify_ct": steps}
    return b"data: " + json.dumps({"output_ids": list(range(tokens)), "meta_info": meta}).encode() + b"\n\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts) + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = event(1) + event(3) + event(7, 2) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 3, 17, 1000])
@pytest.mark.parametrize("crumb", [1, 2, 7, 100000])
def test_events_are_found_however_they_are_cut(size: int, crumb: int) -> None:
    async def fed() -> Connection:
        connection = Connection()
        connection._done = asyncio.get_running_loop().create_future()
        whole = HEAD + chunked(BODY, size)
        for start in range(0, len(whole), crumb):
            connection.data_received(whole[start : start + crumb])
        await connection._done
        return connection

    found = asyncio.run(fed())._events
    assert [one.tokens for one in found] == [1, 3, 7]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "closed the connection"),
        (HEAD + chunked(BODY, 50)[:80], "closed the connection"),
        (HEAD + chunked(event(5), 50), "5 tokens instead of 7"),
        (HEAD + chunked(b'data: {"error": {"message": "no room"}}\n\n', 50), "no room"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "503: busy"),
        (b"HTTP/1.1 400 Bad\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"not this", 3), "400: not this"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (HEAD + b"zz\r\n", "not HTTP"),
    ],
)
def test_an_answer_that_is_not_a_full_one_fails_the_pass(said: bytes, why: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()

    with server(answer) as url, pytest.raises(RequestFailed, match=why):
        go(url, Load(2, "p", 7, 4, 1))


def test_a_server_that_does_not_answer_is_a_hang() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await asyncio.sleep(30)

    with server(answer) as url, pytest.raises(Hung, match="0 of 4"):
        go(url, Load(2, "p", 7, 4, 1), limit_s=0.5)


def test_nobody_there_is_a_failed_request() -> None:
    with pytest.raises(RequestFailed, match="no connection"):
        go("http://127.0.0.1:9", Load(1, "p", 7, 1, 1))
