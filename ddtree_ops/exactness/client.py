"""The requests of the gate, as SGLang 0.5.17 takes them. Thin: asks, bounds, and hands the reply to wire."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType

import httpx

from ddtree_ops import httpclients
from ddtree_ops.exactness import wire

MAX_REPLY_BYTES = 64 << 20
GREEDY: Mapping[str, object] = {"temperature": 0}


class Trouble(Exception):
    """The server did not give an answer that can be judged; ``code`` is stable, the message says which request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def plain(text: str, limit: int = 240) -> str:
    """A server's text for a person: control characters out, length capped."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    shown = " ".join(shown.split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def fresh_key() -> str:
    """A cache namespace nobody has used: a request under it cannot adopt cached KV (SGLang: ``extra_key``)."""
    return "ddtree-gate-" + secrets.token_hex(12)


class Server:
    """One server speaking SGLang's HTTP API. Every method raises Trouble and nothing else for what the server does.

    ``generated`` and ``prefilled`` count what it was made to do, ``requests`` how often it was asked.
    Cancelling a call closes its connection. No time-outs of its own: the gate bounds the whole run.
    """

    def __init__(self, url: str, *, api_key: str | None, connections: int) -> None:
        self._client = httpclients.concurrent(url, api_key, connections=connections)
        self.requests = 0
        self.generated = 0
        self.prefilled = 0

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def info(self, name: str) -> dict[str, object]:
        """``/server_info`` or ``/model_info`` (``name`` without the slash); older servers have ``/get_...`` only."""
        try:
            return await self._ask("GET", f"/{name}")
        except Trouble as trouble:
            if trouble.code != "http-404":
                raise
        return await self._ask("GET", f"/get_{name}")

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        extra_key: str,
        stop_token_ids: Sequence[int] = (),
        logprobs: bool = False,
        sampling: Mapping[str, object] = GREEDY,
    ) -> wire.Generation:
        """Continuation of ``ids``, greedy unless ``sampling`` says how; ``logprobs``: with those of its tokens."""
        chosen: dict[str, object] = {**sampling, "max_new_tokens": max_new_tokens}
        if stop_token_ids:
            chosen["stop_token_ids"] = list(stop_token_ids)
        body: dict[str, object] = {"input_ids": list(ids), "sampling_params": chosen, "extra_key": extra_key}
        if logprobs:
            body["return_logprob"] = True
        reply = await self._generate(body)
        try:
            generated = wire.generation(reply)
        except wire.Malformed as error:
            raise Trouble("malformed", f"/generate: {error}") from error
        self.generated += len(generated.output_ids)
        self.prefilled += len(ids) - (generated.cached_tokens or 0)
        return generated

    async def break_off(self, ids: Sequence[int], *, max_new_tokens: int, extra_key: str) -> None:
        """Begins to generate, and closes the connection as soon as the server has begun to answer."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        body = {"input_ids": list(ids), "sampling_params": sampling, "extra_key": extra_key, "stream": True}
        self.requests += 1
        self.prefilled += len(ids)
        try:
            async with self._client.stream("POST", "/generate", json=body) as response:
                if response.status_code != 200:
                    raise Trouble(
                        f"http-{response.status_code}", f"/generate, streamed, answered {response.status_code}"
                    )
                async for chunk in response.aiter_bytes():
                    if chunk:
                        return
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise Trouble("connection", f"/generate, streamed: {type(error).__name__} {plain(str(error))}") from error

    async def score(self, ids: Sequence[int], *, start: int, texts: bool, top: int = 2) -> wire.Scored:
        """Logprobs of ``ids[start:]`` and the ``top`` best there, in one prefill under a fresh namespace.

        ``texts``: have the server decode the tokens (it needs its tokenizer).
        """
        return await self._score({"input_ids": list(ids)}, start=start, top=top, texts=texts)

    async def scores(self) -> str | None:
        """None when the server tells prompts' logprobs; else why it refuses (SGLang 0.5.17 does under DFLASH)."""
        try:
            await self._score({"input_ids": [0, 1]}, start=0, top=2, texts=False)
        except Trouble as trouble:
            if trouble.code != "logprobs-refused":
                raise
            return trouble.message
        return None

    async def encode(self, text: str, *, by_scoring: bool) -> tuple[int, ...]:
        """The ids of ``text`` by the server's tokenizer, read off a scoring from its first token on, or asked of
        /tokenize (SGLang: entrypoints/openai/protocol.py, TokenizeRequest).
        """
        if not by_scoring:
            try:
                return wire.tokens(await self._ask("POST", "/tokenize", {"prompt": text}))
            except wire.Malformed as error:
                raise Trouble("malformed", f"/tokenize: {error}") from error
        reply = await self._score({"text": text}, start=0, top=0, texts=False)
        return tuple(entry.token for entry in reply.entries)

    async def _score(self, what: dict[str, object], *, start: int, top: int, texts: bool) -> wire.Scored:
        body = {
            **what,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": top,
            "return_text_in_logprobs": texts,
            "extra_key": fresh_key(),
        }
        reply = await self._generate(body)
        try:
            scored = wire.scored(reply, with_top=top > 0)
        except wire.Malformed as error:
            raise Trouble("malformed", f"/generate with logprobs: {error}") from error
        if scored.cached_tokens:
            raise Trouble(
                "cached-score", f"scoring adopted {scored.cached_tokens} cached tokens in spite of a new extra_key"
            )
        self.prefilled += start + len(scored.entries)
        return scored

    async def _generate(self, body: dict[str, object]) -> dict[str, object]:
        try:
            return await self._ask("POST", "/generate", body)
        except Trouble as trouble:
            if body.get("return_logprob") and trouble.code == "http-400":
                raise Trouble("logprobs-refused", trouble.message) from trouble
            raise

    async def _ask(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        self.requests += 1
        try:
            async with self._client.stream(method, path, json=body) as response:
                content = bytearray()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_REPLY_BYTES:
                        raise Trouble("malformed", f"{path}: more than {MAX_REPLY_BYTES >> 20} MiB of reply")
                status = response.status_code
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            raise Trouble("connection", f"{path}: {type(error).__name__} {plain(str(error))}".rstrip()) from error
        if status != 200:
            raise Trouble(
                f"http-{status}", f"{path} answered {status}: {plain(content[:2000].decode(errors='replace'))}"
            )
        try:
            return wire.document(bytes(content))
        except wire.Malformed as error:
            raise Trouble("malformed", f"{path}: {error}") from error
