"""What a service does right now: its ``/metrics`` and nvidia-smi, parsed and put side by side. The parsing is pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx

from ddtree_ops import httpclients
from ddtree_ops.deploy.gate import api_key
from ddtree_ops.errors import DdtreeError, Failed
from ddtree_ops.model import Deployment
from ddtree_ops.remote.metrics import fetch, parse_metrics, total
from ddtree_ops.remote.transport import connect, printable
from ddtree_ops.units import uses_gpus

SMI = ("index", "memory.used", "memory.total", "temperature.gpu", "utilization.gpu")


@dataclass(frozen=True)
class Now:
    """One look. Rates a second, memory in MiB, temperature in degrees; None: not told. ``problem``: why not."""

    tokens_s: float | None = None
    accept_length: float | None = None
    running: int | None = None
    queued: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    hottest: int | None = None
    busiest: int | None = None
    problem: str = ""

    def row(self) -> dict[str, str]:
        """The cells of a table's row."""
        memory = (
            "" if self.memory_used is None else f"{self.memory_used / 1024:.1f}/{(self.memory_total or 0) / 1024:.0f}"
        )
        return {
            "tokens/s": "" if self.tokens_s is None else f"{self.tokens_s:.1f}",
            "accept length": "" if self.accept_length is None else f"{self.accept_length:.2f}",
            "running": "" if self.running is None else str(self.running),
            "queued": "" if self.queued is None else str(self.queued),
            "VRAM GiB": memory,
            "hottest C": "" if self.hottest is None else str(self.hottest),
            "GPU %": "" if self.busiest is None else str(self.busiest),
            "problem": self.problem,
        }


def parse_smi(text: str, indices: list[int]) -> Now:
    """The service's GPUs out of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``; others are left out."""
    rows = []
    for line in text.splitlines()[:64]:
        cells = [int(cell) if cell.strip().isdigit() else None for cell in line.split(",")]
        if len(cells) == len(SMI) and cells[0] in indices:
            rows.append(cells)
    if not rows:
        return Now(problem="nvidia-smi tells nothing of the service's GPUs")
    used, whole, hot, busy = ([row[at] or 0 for row in rows] for at in (1, 2, 3, 4))
    return Now(memory_used=sum(used), memory_total=sum(whole), hottest=max(hot), busiest=max(busy))


def combine(metrics: dict[str, list[float]], cards: Now, rate: float | None) -> Now:
    """One row. ``rate``: tokens a second by the counter, where there were two looks; else the server's own gauge."""
    lengths = metrics.get("sglang:spec_accept_length") or []
    running, queued = total(metrics, "sglang:num_running_reqs"), total(metrics, "sglang:num_queue_reqs")
    return Now(
        tokens_s=total(metrics, "sglang:gen_throughput") if rate is None else rate,
        accept_length=max(lengths, default=None),
        running=None if running is None else int(running),
        queued=None if queued is None else int(queued),
        memory_used=cards.memory_used,
        memory_total=cards.memory_total,
        hottest=cards.hottest,
        busiest=cards.busiest,
        problem=cards.problem,
    )


def watch(deployment: Deployment, interval_s: float) -> Iterator[Now]:
    """A look every ``interval_s`` seconds, for ever. A host that is away is a row that says so, and is dialled anew."""
    while True:
        try:
            yield from _connected(deployment, interval_s)
        except DdtreeError as error:
            yield Now(problem=error.message)
            time.sleep(interval_s)


def _connected(deployment: Deployment, interval_s: float) -> Iterator[Now]:
    with ExitStack() as stack:
        transport = stack.enter_context(connect(deployment.host))
        key = api_key(transport, deployment.profile)
        url = stack.enter_context(transport.forward(deployment.service.port))
        client = stack.enter_context(httpclients.blocking(url, key, timeout_s=5))
        last: tuple[float, float] | None = None
        while True:
            began, cards, problem, metrics = time.monotonic(), Now(), "", {}
            if uses_gpus(deployment):
                words = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
                try:
                    said = transport.run(words, timeout=5, limit=1 << 16)
                    text = said.stdout.decode(errors="replace")
                    cards = (
                        parse_smi(text, deployment.service.gpus)
                        if said.code == 0
                        else Now(problem=printable(said.stdout, 200))
                    )
                except Failed as error:
                    cards = Now(problem=error.message)
            try:
                metrics = parse_metrics(fetch(client))
            except (httpx.HTTPError, Failed) as error:
                problem = f"/metrics: {error}"
                transport.run(["true"], timeout=5)  # Unreachable, when it is the link that is lost
            count = total(metrics, "sglang:generation_tokens")
            rate = None if last is None or count is None or count < last[1] else (count - last[1]) / (began - last[0])
            last = None if count is None else (began, count)
            now = combine(metrics, cards, rate)
            yield now if not problem else Now(**{**vars(now), "problem": problem})
            time.sleep(max(0.0, interval_s - (time.monotonic() - began)))
