"""Questions to one server, SGLang's /generate as it is: JSON in, JSON out; a refusal is an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from ddtree_ops import httpclients

JSON = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """``status`` 0: the connection broke. ``body`` is what came, {} where that was no JSON object."""

    status: int
    body: JSON
    text: str

    @property
    def ids(self) -> list[int]:
        return list(self.body["output_ids"])

    @property
    def meta(self) -> JSON:
        return dict(self.body["meta_info"])


class Asker:
    """One server's client. Nothing here raises for what the server does; time-outs answer with status 0."""

    def __init__(self, url: str, connections: int = 64) -> None:
        self.client = httpclients.concurrent(url, None, connections=connections, timeout_s=120)

    async def post(self, path: str, body: JSON) -> Answer:
        return await self._ask("POST", path, body)

    async def get(self, path: str) -> Answer:
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, body: JSON | None) -> Answer:
        try:
            reply = await self.client.request(method, path, json=body)
        except (httpx.HTTPError, OSError) as error:
            return Answer(0, {}, f"{type(error).__name__} {error}")
        try:
            parsed = reply.json()
        except ValueError:
            parsed = {}
        return Answer(reply.status_code, parsed if isinstance(parsed, dict) else {}, reply.text[:600])

    async def generate(self, ids: Sequence[int], tokens: int, *, temperature: float = 0.0, **more: Any) -> Answer:
        """``more`` goes beside ``sampling_params``; ``sampling=`` into it."""
        sampling = {"temperature": temperature, "max_new_tokens": tokens, **more.pop("sampling", {})}
        return await self.post("/generate", {"input_ids": list(ids), "sampling_params": sampling, **more})

    async def score(self, ids: Sequence[int], start: int, *, top: int = 2, tokens: int = 0, **more: Any) -> Answer:
        """Logprobs of ``ids[start:]``, in one prefill."""
        asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": top, **more}
        return await self.generate(ids, tokens, **asked)

    async def alive(self) -> bool:
        answer = await self.generate([300, 301, 302], 4)
        return answer.status == 200 and len(answer.ids) > 0
