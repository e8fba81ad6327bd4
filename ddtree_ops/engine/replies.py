"""Replies of /generate in SGLang's shape, grown from the engine's updates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .request import TokenLogprob, Top, Update
from .schema import Item

Decode = Callable[[list[int]], str]


class Reply:
    """One prompt's reply so far. As in SGLang every streamed chunk holds everything since the beginning."""

    def __init__(self, item: Item, decode: Decode | None, text_in_logprobs: bool) -> None:
        """decode: None without a tokenizer; the reply then has no `text`, as SGLang's has none."""
        self.item, self._decode, self._with_text = item, decode, text_in_logprobs
        self._created = time.monotonic()
        self._total = Update()

    @property
    def finished(self) -> bool:
        """Whether the last update has come."""
        return self._total.finish is not None

    @property
    def failure(self) -> str | None:
        """Why the engine could not finish this request, or None."""
        finish = self._total.finish
        return str(finish["message"]) if finish is not None and self._total.failed else None

    def add(self, update: Update) -> None:
        """Take an update in, in the order in which the engine sent them."""
        total = self._total
        total.output_ids += update.output_ids
        total.input_logprobs += update.input_logprobs
        total.input_top += update.input_top
        total.output_logprobs += update.output_logprobs
        total.output_top += update.output_top
        total.cached_tokens = update.cached_tokens
        total.verify_count, total.accepted = update.verify_count, update.accepted
        total.finish, total.failed = update.finish, update.failed

    def render(self) -> dict[str, Any]:
        """{text, output_ids, meta_info}.

        meta_info.spec_accept_length is SGLang's: completion_tokens / spec_verify_ct. The first token comes from the
        prefill and is part of completion_tokens, tokens behind a stop are not; the server-wide gauge and
        avg_spec_accept_length count what verify steps committed and nothing else. Without verify steps (AR, or one
        token) the keys are absent, and until the request has finished, as SGLang adds them up then.
        """
        total, item = self._total, self.item
        meta: dict[str, Any] = {
            "id": item.rid,
            "finish_reason": total.finish,
            "prompt_tokens": len(item.prompt),
            "completion_tokens": len(total.output_ids),
            "cached_tokens": total.cached_tokens,
        }
        if total.verify_count and self.finished:
            meta["spec_verify_ct"] = total.verify_count
            meta["spec_correct_drafts_histogram"] = total.accepted
            meta["spec_accept_length"] = len(total.output_ids) / total.verify_count
        if item.logprobs is not None:
            meta["input_token_logprobs"] = self._entries(total.input_logprobs)
            meta["output_token_logprobs"] = self._entries(total.output_logprobs)
            if item.logprobs.top:
                meta["input_top_logprobs"] = self._alternatives(total.input_top)
                meta["output_top_logprobs"] = self._alternatives(total.output_top)
        if self.finished:
            meta["e2e_latency"] = time.monotonic() - self._created
        reply: dict[str, Any] = {"output_ids": list(total.output_ids), "meta_info": meta}
        return reply if self._decode is None else {"text": self._text(self._decode), **reply}

    def _text(self, decode: Decode) -> str:
        ids, finish = self._total.output_ids, self._total.finish
        if finish is not None and finish["type"] == "stop":
            return decode(ids[:-1])
        text = decode(ids)
        # A character whose last bytes are still to come would flicker in the stream.
        return text if self.finished else text.rstrip("\N{REPLACEMENT CHARACTER}")

    def _entries(self, found: list[TokenLogprob]) -> list[tuple[float | None, int, str | None]]:
        text = self._decode if self._with_text else None
        return [(logprob, token, None if text is None else text([token])) for logprob, token in found]

    def _alternatives(self, found: list[Top]) -> list[list[tuple[float | None, int, str | None]] | None]:
        return [None if top is None else self._entries(top) for top in found]
