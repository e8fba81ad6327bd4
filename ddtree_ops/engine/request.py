"""What the engine is asked and what it answers, between the HTTP side and the step loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

TokenLogprob = tuple[float | None, int]
"""(natural log-probability, token id); None for the first input token, which nothing predicts."""

Top = list[TokenLogprob] | None
"""The most probable tokens at one position, descending; None where nothing predicts it."""


@dataclass(frozen=True)
class LogprobOptions:
    """start: first prompt position reported; top: how many alternatives a position."""

    start: int
    top: int


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: SGLang's sampling parameters. The default is greedy, without penalties.

    seed: an int64 that with a position fixes a draw. top_k -1: all.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken; below 1e-6 SGLang reads a temperature as 0."""
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether the output so far changes the logits."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


GREEDY = Sampling()


@dataclass
class Update:
    """Progress of one request since its last update, safe to hand to another thread.

    verify_count and committed are totals since the request's start: decode steps that verified a draft, and the tokens
    that they committed, those included that then fell behind a stop or the length limit. accepted[n]: how many steps
    accepted n drafts.
    finish: None while it runs, else SGLang's finish_reason: {type: length, length} | {type: stop, matched} |
    {type: abort, message}. `failed` marks an abort for which the engine, not the client, is to blame.
    cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    output_ids: list[int] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top: list[Top] = field(default_factory=list)
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    output_top: list[Top] = field(default_factory=list)
    verify_count: int = 0
    committed: int = 0
    accepted: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish: dict[str, str | int] | None = None
    failed: bool = False


@dataclass(frozen=True)
class Request:
    """A validated request. max_new_tokens may be 0: the prompt is scored and nothing is generated.

    `sink` gets every update, from the engine's thread; `stream` asks for one a step and not only the last.
    Prefixes are shared inside a `namespace` only (extra_key).
    """

    rid: str
    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    logprobs: LogprobOptions | None
    stream: bool
    sink: Callable[[Update], None]
    sampling: Sampling = GREEDY
    namespace: str = ""
    created: float = field(default_factory=time.monotonic)
