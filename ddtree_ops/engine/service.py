"""The engine as the HTTP side sees it: limits, tokenizer, submission, and what it says about itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from . import VERSION
from .arguments import Arguments
from .config import ConfigError
from .loading import Resolved
from .metrics import Metrics
from .replies import Decode, Reply
from .request import Request, Update
from .scheduler import Scheduler
from .schema import Call, Limits, RequestError
from .step import Decoder

_WEDGED_SECONDS = 60.0


def load_tokenizer(a: Arguments, vocab_size: int) -> Tokenizer | None:
    """The tokenizer, or None with --skip-tokenizer-init. Raises ConfigError; also when its ids exceed the model's."""
    if a.skip_tokenizer_init:
        return None
    path = a.tokenizer_path or a.model_path
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file}: no tokenizer; give --tokenizer-path or --skip-tokenizer-init")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        # The tokenizers library raises bare Exception for every malformed file.
        raise ConfigError(f"{file}: not a tokenizer: {error}") from None
    if (size := tokenizer.get_vocab_size()) > vocab_size:
        raise ConfigError(f"{file}: has {size} tokens, the model {vocab_size}")
    return tokenizer


class Progress:
    """A call in flight, to be used on one event loop. Whoever makes one calls `abandon` in the end."""

    def __init__(self, scheduler: Scheduler, call: Call, decode: Decode | None) -> None:
        """Submits the call; must run on the loop that will iterate. Raises RequestError."""
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self.replies = [Reply(item, decode, call.text_in_logprobs) for item in call.items]
        requests = [
            Request(
                rid=item.rid,
                prompt=item.prompt,
                max_new_tokens=item.max_new_tokens,
                stop_token_ids=item.stop_token_ids,
                logprobs=item.logprobs,
                stream=call.stream,
                sink=partial(self._deliver, index),
                sampling=item.sampling,
                namespace=item.namespace,
            )
            for index, item in enumerate(call.items)
        ]
        try:
            scheduler.submit(requests)
        except KeyError as error:
            raise RequestError("rid", f"{error.args[0]!r} is in flight already") from None
        except RuntimeError as error:
            raise RequestError(None, str(error), 503) from None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Reply]]:
        """(index, reply so far) at each prompt's progress (streaming) or end, until all prompts have ended."""
        left = len(self.replies)
        while left:
            index, update = await self._arrived.get()
            self.replies[index].add(update)
            left -= self.replies[index].finished
            yield index, self.replies[index]

    def abandon(self) -> None:
        """End what still runs: nobody waits for it any more."""
        for reply in self.replies:
            if not reply.finished:
                self._scheduler.abort(reply.item.rid, "the client is gone")

    def _deliver(self, index: int, update: Update) -> None:
        # The loop is closed only when the process is about to end; nobody waits for an update then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, update))


@dataclass(frozen=True)
class Service:
    """Everything that a route needs. `port` is the one really bound."""

    arguments: Arguments
    resolved: Resolved
    decoder: Decoder
    scheduler: Scheduler
    metrics: Metrics
    tokenizer: Tokenizer | None
    port: int
    api_key: str | None

    @property
    def limits(self) -> Limits:
        """What a request is checked against."""
        model, table, tokenizer = self.resolved.model, self.decoder.table, self.tokenizer
        return Limits(
            vocab_size=model.vocab_size,
            context_length=self.resolved.context_length,
            eos_token_ids=model.eos_token_ids,
            max_slots=min(table.columns, table.slots),
            slots=self.scheduler.slots_for,
            tokenize=None if tokenizer is None else lambda text: list(tokenizer.encode(text).ids),
        )

    @property
    def decode(self) -> Decode | None:
        """Token ids to text, special tokens left out; None without a tokenizer."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))

    def unhealthy(self) -> str | None:
        """Why the engine must not get requests, or None."""
        if self.scheduler.failure is not None:
            return self.scheduler.failure
        if (seconds := self.scheduler.busy_for()) > _WEDGED_SECONDS:
            return f"one step has taken {seconds:.0f} s"
        return None

    def submit(self, call: Call) -> Progress:
        """Queue a call's prompts together. Raises RequestError: a rid in flight already, or no requests are taken."""
        return Progress(self.scheduler, call, self.decode)

    def model_info(self) -> dict[str, Any]:
        """SGLang's /model_info."""
        a = self.arguments
        return {
            "model_path": str(a.model_path),
            "tokenizer_path": str(a.tokenizer_path or a.model_path),
            "served_model_name": self.model_name,
            "is_generation": True,
            "vocab_size": self.resolved.model.vocab_size,
            "context_length": self.resolved.context_length,
        }

    def server_info(self) -> dict[str, Any]:
        """Resolved arguments under SGLang's names, and internal_states[0]: what the engine really did.

        executed: nodes (root excluded), most children of a node and deepest path of the last step's trees, measured
        on the arrays that it verified; null before the first step. kv_slots_free counts what eviction would free too.
        """
        a, r = self.arguments, self.resolved
        running, queued, free = self.scheduler.load()
        shape = self.decoder.executed
        return {
            "model_path": str(a.model_path),
            "tokenizer_path": str(a.tokenizer_path or a.model_path),
            "served_model_name": self.model_name,
            "skip_tokenizer_init": a.skip_tokenizer_init,
            "host": a.host,
            "port": self.port,
            "dtype": a.dtype,
            "context_length": r.context_length,
            "vocab_size": r.model.vocab_size,
            "max_running_requests": a.max_running_requests,
            "max_total_tokens": r.max_total_tokens,
            "page_size": a.page_size,
            "disable_radix_cache": a.disable_radix_cache,
            "speculative_algorithm": a.speculative_algorithm,
            "speculative_draft_model_path": _text(a.speculative_draft_model_path),
            "speculative_num_draft_tokens": r.num_draft_tokens,
            "speculative_ddtree_budget": a.speculative_ddtree_budget,
            "speculative_ddtree_ladder": a.speculative_ddtree_ladder,
            "speculative_ddtree_topk": a.speculative_ddtree_topk,
            "speculative_sampling": (a.speculative_sampling or "per-node") if a.speculative_algorithm else None,
            "block_size": r.draft.block_size if r.draft else None,
            "nnodes": a.nnodes,
            "node_rank": a.node_rank,
            "tp_size": a.tp_size,
            "dist_init_addr": a.dist_init_addr,
            "version": VERSION,
            "fault": a.fault,
            "internal_states": [
                {
                    "avg_spec_accept_length": self.metrics.average_commit_length,
                    "executed": None
                    if shape is None
                    else {"nodes": shape.nodes, "max_children": shape.max_children, "max_depth": shape.max_depth},
                    "num_running_reqs": running,
                    "num_queue_reqs": queued,
                    "kv_slots_free": free,
                    "kv_slots_cached": self.decoder.cache.cached,
                    "kv_slots_total": self.decoder.table.slots,
                }
            ],
        }

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.arguments.served_model_name or str(self.arguments.model_path)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
