"""The load client's own ceiling on this machine: the load of a cell against the stub, in place of a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ddtree_ops.errors import Failed
from ddtree_ops.sweep.grid import Load
from ddtree_ops.sweep.load import drive
from ddtree_ops.sweep.workload import PromptSet

REQUESTS_PER_SLOT, LIMIT_S = 4, 60.0
#: A cell faster than this share of the client's ceiling measures the client too.
SHARE = 0.5


def ceilings(concurrency: Sequence[int], max_tokens: int) -> dict[int, tuple[float, float]]:
    """C -> (tokens/s, chunks/s) that the client takes at most, everything it does for a server's cell included.

    The stub takes a core of its own where there is one: on a single core the true ceiling is higher. Raises Failed.
    """
    prompts = PromptSet("stub", tuple((index, index + 1, index + 2) for index in range(512)))
    found: dict[int, tuple[float, float]] = {}
    with stub() as url:
        for value in sorted(set(concurrency)):
            count = max(32, REQUESTS_PER_SLOT * value)
            load = Load(value, prompts.name, max_tokens, count, 1)
            samples = asyncio.run(drive(url, prompts, load, limit_s=LIMIT_S))
            seconds = max(s.answer.events[-1].at for s in samples) - min(s.answer.sent for s in samples)
            chunks = sum(len(sample.answer.events) for sample in samples)
            found[value] = (round(count * max_tokens / seconds), round(chunks / seconds))
    return found


@contextmanager
def stub(step_ms: float = 0.0) -> Iterator[str]:
    """The stub server in a process of its own; its URL. ``step_ms``: its pace, as fast as it can without."""
    argv = [sys.executable, "-m", "ddtree_ops.sweep.stub", str(step_ms)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise Failed("the stub server for the client's ceiling did not start")
            yield f"http://127.0.0.1:{port.decode()}"
        finally:
            process.kill()
