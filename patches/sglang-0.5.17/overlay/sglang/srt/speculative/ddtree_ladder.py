"""DDTREE: a budget that depends on the batch size, without a restart.

A tree pays while the target's matrix products wait for memory anyway; with many requests they no longer do, and its
nodes cost what they weigh. A rung says from how many requests on which budget holds. Each has CUDA graphs, a mask and
metadata of its own width. Budget 0 is AR through the same worker: no draft pass, a verify of one node, and the
drafter's KV filled as ever, so that the next smaller batch drafts on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.speculative.ddtree_base import decode_graphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rung:
    """From ``first`` requests on, until the next rung: trees of ``budget`` nodes besides the root."""

    first: int
    budget: int


def parse_ladder(text: str | None, budget: int) -> tuple[Rung, ...]:
    """The rungs of ``--speculative-ddtree-ladder``, such as ``8:8,32:0``, and before them that of ``budget`` from one
    request on. Raises ValueError that says what is wrong."""
    rungs, words = [Rung(1, budget)], f"DDTREE: --speculative-ddtree-ladder {text}"
    for step in [] if text is None else text.split(","):
        if re.fullmatch(r"[0-9]{1,6}:[0-9]{1,6}", step) is None:
            raise ValueError(f"{words}: {step!r} is not REQUESTS:BUDGET, such as 8:8")
        rung = Rung(*map(int, step.split(":")))
        if rung.first <= rungs[-1].first:
            raise ValueError(f"{words}: {rung.first} does not exceed {rungs[-1].first}")
        if rung.budget >= rungs[-1].budget:
            raise ValueError(
                f"{words}: from {rung.first} requests on the budget must be below {rungs[-1].budget}, not {rung.budget}"
            )
        rungs.append(rung)
    return tuple(rungs)


def graph_sizes(rungs: Sequence[Rung], place: int, sizes: Sequence[int]) -> list[int]:
    """Of the batch sizes that graphs are captured for, those that a rung's batches run in, padded ones included; none
    where the rung begins beyond them all."""
    first = rungs[place].first
    last = rungs[place + 1].first - 1 if place + 1 < len(rungs) else max(sizes)
    wanted = {min((size for size in sizes if size >= bs), default=max(sizes)) for bs in range(first, last + 1)}
    return sorted(wanted)


@dataclass(frozen=True)
class Built:
    """A rung with what the target runs it by; ``graphs`` None where none are captured."""

    rung: Rung
    backend: Any
    graphs: Any


class Ladder:
    """The rungs of one target runner, the widest of which is what the runner was started with."""

    def __init__(self, runner: Any, rungs: Sequence[Rung]) -> None:
        self._runner = runner
        self._rungs = tuple(rungs)
        self.built = [Built(rungs[0], runner.attn_backend, runner.decode_cuda_graph_runner)]

    def build(self) -> None:
        """Captures the other rungs' graphs. The runner is as before afterwards."""
        for place, rung in enumerate(self._rungs[1:], 1):
            self.built.append(self._capture(place, rung))
        self._use(self.built[0])

    def take(self, bs: int) -> Rung:
        """The rung of a batch of so many requests; the runner goes on with it."""
        found = self._at(bs)
        self._use(found)
        return found.rung

    def rung(self, bs: int) -> Rung:
        return self._at(bs).rung

    def _at(self, bs: int) -> Built:
        return next(one for one in reversed(self.built) if one.rung.first <= bs)

    def _use(self, built: Built) -> None:
        self._runner.attn_backend, self._runner.decode_cuda_graph_runner = built.backend, built.graphs

    def _capture(self, place: int, rung: Rung) -> Built:
        from sglang.srt.runtime_context import get_context, get_spec

        runner, decode = self._runner, decode_graphs(self._runner)
        width, sizes = get_spec().speculative_num_draft_tokens, decode.bs
        captured = self.built[0].graphs
        get_context().override("ddtree.rung", speculative_num_draft_tokens=rung.budget + 1)
        try:
            runner.attn_backend = backend = runner._get_attention_backend(init_new_workspace=True)
            needed = [] if captured is None else graph_sizes(self._rungs, place, captured.capture_bs)
            if not needed:
                return Built(rung, backend, None)
            decode.bs = needed
            # in the words of the runner's own capture
            text = "Capture target verify CUDA graph begin. rung from %d requests on, num_tokens_per_req=%d, bs=%s"
            logger.info(text, rung.first, rung.budget + 1, needed)
            graphs = type(captured)(runner, attn_backend=backend, speculative_num_draft_tokens=rung.budget + 1)
            return Built(rung, backend, graphs)
        finally:
            decode.bs = sizes
            get_context().override("ddtree.rung", speculative_num_draft_tokens=width)
