"""The step loop: one thread that admits, prefills and steps requests, and says what became of them.

Requests join and leave between steps; those in flight share every step. First come, first served: the head of the
queue waits until it fits, and nobody overtakes it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from . import logprobs
from .cache import Lease
from .faults import Fault
from .metrics import Metrics
from .rendezvous import RankLostError
from .request import Request, Update
from .sampling import tempered
from .step import Decoder, Prompt, Sequence

log = logging.getLogger(__name__)

_PREFILL_TOKENS = 4096
"""Most prompt tokens that join in one step (one prompt always may): others in flight wait no longer than that."""


@dataclass
class _Running:
    request: Request
    lease: Lease
    sequence: Sequence
    generated: int = 0
    verify_count: int = 0
    committed: int = 0
    accepted: list[int] = field(default_factory=list)
    pending: Update = field(default_factory=Update)


class Scheduler:
    """Owns the decoder. Every public method may be called from any thread."""

    def __init__(
        self, decoder: Decoder, width: int, max_running: int, metrics: Metrics, on_crash: Callable[[str], None]
    ) -> None:
        """width: W, the reserve each request needs; on_crash(reason) is called once, from the loop's thread."""
        self._decoder, self._width, self._max_running = decoder, width, max_running
        self._metrics, self._on_crash = metrics, on_crash
        self._condition = threading.Condition()
        self._queue: deque[Request] = deque()
        self._running: list[_Running] = []
        self._known: set[str] = set()
        self._aborts: dict[str, str] = {}
        self._stopping: str | None = None
        self._busy_since: float | None = None
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def submit(self, requests: list[Request]) -> None:
        """Queue requests together. Raises KeyError(rid) if one is in flight already, RuntimeError when stopping."""
        with self._condition:
            if (reason := self.failure or self._stopping) is not None:
                raise RuntimeError(reason)
            for i, request in enumerate(requests):
                if request.rid in self._known or any(request.rid == other.rid for other in requests[:i]):
                    raise KeyError(request.rid)
            self._known.update(request.rid for request in requests)
            self._queue.extend(requests)
            self._condition.notify()

    def abort(self, rid: str, message: str = "aborted") -> None:
        """End a request at the next step boundary; its slots are free then. Unknown ids are ignored: it ended."""
        with self._condition:
            if rid in self._known:
                self._aborts[rid] = message
                self._condition.notify()

    def abort_all(self, message: str) -> None:
        """End every request that waits or runs."""
        with self._condition:
            self._aborts.update(dict.fromkeys(self._known, message))
            self._condition.notify()

    def stop(self, reason: str) -> None:
        """Refuse new requests, abort the others, end the loop. Returns at once."""
        with self._condition:
            self._stopping = reason
            self._condition.notify()

    def join(self, timeout: float) -> None:
        """Wait for the loop to end, at most `timeout` seconds."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def load(self) -> tuple[int, int, int]:
        """(requests running, requests waiting, KV slots free) now."""
        with self._condition:
            return len(self._running), len(self._queue), self._decoder.cache.free

    def flush(self) -> bool:
        """Forget the prefix cache. False, and nothing done, while requests run or wait."""
        with self._condition:
            if self._running or self._queue:
                return False
            self._decoder.cache.flush()
            return True

    def busy_for(self) -> float:
        """Seconds that the present step has taken so far; 0.0 when idle. A large value means a wedged loop."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def slots_for(self, prompt: int, max_new_tokens: int) -> int:
        """KV slots that a request holds for its whole life, the reserve of one verify included."""
        return prompt + (max_new_tokens + self._width if max_new_tokens > 1 else 0)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            # Nothing that went wrong in here can be trusted again: say so to everybody and take the process down.
            if isinstance(error, RankLostError):
                self.failure = str(error)
            else:
                log.critical("the step loop failed: %s", error, exc_info=True)
                self.failure = f"the step loop failed: {type(error).__name__}: {error}"
            try:
                self._end_everything(self.failure, failed=True)
            finally:
                self._on_crash(self.failure)

    def _turn(self) -> bool:
        if not self._await_work():
            self._decoder.trunk.beat()
            return True
        with self._condition:
            self._busy_since = time.monotonic()
            if self._stopping is None:
                self._drop_aborted()
                joining = self._admit()
            self._metrics.queue(len(self._running), len(self._queue))
        if self._stopping is not None:
            self._end_everything(self._stopping, failed=False)
            return False
        if joining:
            self._prefill(joining)
        if self._running:
            self._step()
        with self._condition:
            self._metrics.queue(len(self._running), len(self._queue))
        return True

    def _await_work(self) -> bool:
        """Whether there is something to do; False when nothing was for so long that other ranks must hear of it."""
        with self._condition:
            if self._has_work():
                return True
            self._busy_since = None
            return self._condition.wait_for(self._has_work, self._decoder.trunk.beat_seconds)

    def _has_work(self) -> bool:
        return bool(self._queue or self._running or self._aborts or self._stopping)

    def _drop_aborted(self) -> None:
        aborts, self._aborts = self._aborts, {}
        for request in [r for r in self._queue if r.rid in aborts]:
            self._queue.remove(request)
            self._known.discard(request.rid)
            request.sink(Update(finish={"type": "abort", "message": aborts[request.rid]}))
        for running in [r for r in self._running if r.request.rid in aborts]:
            self._finish(running, {"type": "abort", "message": aborts[running.request.rid]})

    def _admit(self) -> list[_Running]:
        joining: list[_Running] = []
        tokens = 0
        while self._queue and len(self._running) < self._max_running:
            request = self._queue[0]
            tokens += len(request.prompt)
            if joining and tokens > _PREFILL_TOKENS:
                break
            needed = self.slots_for(len(request.prompt), request.max_new_tokens)
            # Whatever is cached has no logits: those that are wanted must be computed.
            lease = self._decoder.cache.join(request.prompt, _logits_from(request), needed, request.namespace)
            if lease is None:
                break
            joining.append(_Running(self._queue.popleft(), lease, Sequence(lease.row, sampling=request.sampling)))
            self._running.append(joining[-1])
        return joining

    def _prefill(self, joining: list[_Running]) -> None:
        cache = self._decoder.cache
        prompts = []
        for r in joining:
            limit = r.request.max_new_tokens
            steps = limit > 1 or (cache.keeps and limit == 1)
            prompts.append(Prompt(r.sequence, r.request.prompt, _logits_from(r.request), steps, r.lease.cached))
        for r, logits in zip(joining, self._decoder.prefill(prompts), strict=True):
            request = r.request
            self._metrics.prefilled(len(request.prompt) - r.lease.cached, r.lease.cached)
            if request.max_new_tokens:
                # A prompt that was only scored left no draft context: it is not kept.
                cache.keep(r.lease, request.prompt)
            if (wanted := request.logprobs) is not None:
                r.pending.input_logprobs, r.pending.input_top = logprobs.of_prompt(
                    logits, request.prompt, wanted.start, wanted.top
                )
            if request.max_new_tokens:
                self._metrics.first_token(time.monotonic() - request.created)
                if wanted is not None:
                    used = tempered(logits[-1:], request.sampling)
                    chosen = logprobs.of_tokens(used, [r.sequence.bonus], wanted.top)
                    r.pending.output_logprobs, r.pending.output_top = chosen
                self._gain(r, [r.sequence.bonus])
            else:
                self._finish(r, {"type": "length", "length": 0})

    def _step(self) -> None:
        batch = list(self._running)
        result = self._decoder.step([r.sequence for r in batch])
        self._metrics.stepped(len(batch), sum(map(len, result.tokens)))
        for r, tokens, rows in zip(batch, result.tokens, result.rows, strict=True):
            if self._decoder.drafter is not None:
                r.verify_count += 1
                r.committed += len(tokens)
                # the last token of a path is the target's own
                r.accepted += [0] * (len(tokens) - len(r.accepted))
                r.accepted[len(tokens) - 1] += 1
            if (wanted := r.request.logprobs) is not None:
                scores, top = logprobs.of_tokens(result.logits[rows], tokens, wanted.top)
                r.pending.output_logprobs += scores
                r.pending.output_top += top
            self._gain(r, tokens)

    def _gain(self, r: _Running, tokens: list[int]) -> None:
        """Take tokens up to the first stop or the last allowed one, whichever comes first in the path."""
        request = r.request
        finish: dict[str, str | int] | None = None
        fault = self._decoder.fault
        kept = tokens if fault is Fault.OVERLONG_OUTPUT else tokens[: request.max_new_tokens - r.generated]
        for place, token in enumerate(kept):
            if fault is Fault.STOP_IN_PATH_IGNORED and place + 1 < len(kept):
                continue
            if token in request.stop_token_ids:
                kept = kept[: place + 1]
                finish = {"type": "stop", "matched": token}
                break
        r.generated += len(kept)
        self._metrics.generated(len(kept))
        r.pending.output_ids += kept
        # Logprobs came with the whole path; beyond the cut there is nothing to report.
        del r.pending.output_logprobs[len(r.pending.output_ids) :]
        del r.pending.output_top[len(r.pending.output_ids) :]
        if finish is None and r.generated >= request.max_new_tokens:
            finish = {"type": "length", "length": r.generated}
        if finish is not None:
            self._finish(r, finish)
        elif request.stream:
            self._send(r)

    def _finish(self, r: _Running, finish: dict[str, str | int], failed: bool = False) -> None:
        with self._condition:
            self._running.remove(r)
            self._known.discard(r.request.rid)
            # Behind a stop or the limit the path may go on: what nobody was given is not kept either.
            given = [*r.request.prompt, *r.sequence.output[: r.generated]]
            committed = r.sequence.length + (self._decoder.fault is Fault.BONUS_KV_KEPT)
            if r.generated and not failed:
                self._decoder.cache.keep(r.lease, given[:committed])
            self._decoder.cache.leave(r.lease, aborted=finish["type"] == "abort")
        r.pending.finish, r.pending.failed = finish, failed
        self._send(r)

    def _send(self, r: _Running) -> None:
        r.pending.verify_count, r.pending.committed = r.verify_count, r.committed
        r.pending.accepted = list(r.accepted)
        r.pending.cached_tokens = r.lease.cached
        update, r.pending = r.pending, Update()
        r.request.sink(update)

    def _end_everything(self, reason: str, failed: bool) -> None:
        with self._condition:
            waiting = list(self._queue)
            self._queue.clear()
            self._known.clear()
        for request in waiting:
            request.sink(Update(finish={"type": "abort", "message": reason}, failed=failed))
        for r in list(self._running):
            self._finish(r, {"type": "abort", "message": reason}, failed=failed)


def _logits_from(request: Request) -> int:
    """The first prompt position whose logits are wanted."""
    return request.logprobs.start if request.logprobs else len(request.prompt) - 1
