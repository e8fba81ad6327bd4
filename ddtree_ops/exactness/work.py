"""What the methods of one run share: the server, the evidence, bounded concurrency, and the check of every output."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ddtree_ops.exactness import judge
from ddtree_ops.exactness.client import Server, Trouble, fresh_key
from ddtree_ops.exactness.evidence import Evidence, Ids
from ddtree_ops.exactness.judge import Position
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.verdict import Severity
from ddtree_ops.exactness.wire import Generation, Malformed, Scored

MAX_TROUBLES = 3
EDGE = "context-limit"
"""The name of the prompt that the gate adds itself where it can reach the context's limit."""
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
NOT_SCORED = ("id-outside-vocabulary", "not-finished", "prompt-changed", "empty-output")

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Facts:
    """What the server told about itself. ``context``: its longest sequence, where known. ``logprobs``: whether it
    scores prompts. ``methods``: those that this run judges by. ``page``: tokens a page of its cache.
    """

    vocab_size: int | None
    context: int | None
    tokenizer: bool
    logprobs: bool
    methods: tuple[str, ...]
    page: int


@dataclass(frozen=True)
class Output:
    """One generated output. ``prompt`` is an index into its group, ``tokens`` has the stop token, ``limit`` is the
    max_new_tokens it was asked with, ``key`` the cache namespace it was made under.
    """

    prompt: int
    tokens: Ids
    limit: int
    key: str
    finish: str
    verify_steps: int | None


@dataclass
class Group:
    """Up to GROUP prompts on their way through the methods. ``limits``: max_new_tokens of each, as far as the context
    has room; ``scores``: positions by (prompt, tokens).
    """

    names: list[str]
    ids: list[Ids]
    limits: list[int]
    outputs: dict[Load, list[Output]] = field(default_factory=dict)
    scores: dict[tuple[int, Ids], list[Position]] = field(default_factory=dict)

    def score(self, prompt: int, tokens: Ids) -> list[Position] | None:
        """Of exactly these tokens, or the beginning of a longer output's: a position depends on what is before it."""
        if (found := self.scores.get((prompt, tokens))) is not None:
            return found
        for (owner, longer), positions in self.scores.items():
            if owner == prompt and longer[: len(tokens)] == tokens:
                return positions[: len(tokens)]
        return None

    def distinct(self) -> list[tuple[int, Ids]]:
        """Every (prompt, output) once, those left out that only begin another."""
        longest: dict[int, list[Ids]] = {}
        every = [(one.prompt, one.tokens) for outputs in self.outputs.values() for one in outputs if one.tokens]
        for prompt, tokens in sorted(dict.fromkeys(every), key=lambda item: -len(item[1])):
            kept = longest.setdefault(prompt, [])
            if not any(other[: len(tokens)] == tokens for other in kept):
                kept.append(tokens)
        return [(prompt, tokens) for prompt, kept in sorted(longest.items()) for tokens in kept]


class TooMuchTrouble(Exception):
    """The server answers too little to go on; what was seen so far is in the evidence."""


class Work:
    """Runs requests for the methods of one run; what goes wrong goes into the evidence."""

    def __init__(self, server: Server, evidence: Evidence, facts: Facts, progress: Progress | None, total: int) -> None:
        """``total``: how many steps are foreseen; ``progress`` hears of each and never of more than that."""
        self.server = server
        self.evidence = evidence
        self.plan = evidence.plan
        self.facts = facts
        self.stops = set(self.plan.stop_token_ids)
        self._progress = progress
        self._total = total
        self._done = 0

    @property
    def unscored(self) -> Severity:
        """What a difference is worth that no logprob explains: in fp32 a failure, else a near-tie under the rate."""
        return "fail" if self.plan.dtype == "float32" else "near-tie"

    async def each(self, limit: int, items: Sequence[T], act: Callable[[T], Awaitable[R]], what: str) -> list[R | None]:
        """``act`` on every item with ``limit`` in flight; None where the server made trouble, which is recorded."""
        results: list[R | None] = [None] * len(items)
        waiting = iter(enumerate(items))

        async def work() -> None:
            for i, item in waiting:
                if self.evidence.troubles >= MAX_TROUBLES:
                    return
                try:
                    results[i] = await act(item)
                except Trouble as trouble:
                    self.evidence.troubles += 1
                    self.evidence.reason("inconclusive", trouble.code, f"{what}: {trouble.message}")
                self._done = min(self._done + 1, self._total)
                if self._progress:
                    self._progress(what, self._done, self._total)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(items))):
                group.create_task(work())
        return results

    def stop_if_hopeless(self) -> None:
        """Raises TooMuchTrouble."""
        if self.evidence.troubles >= MAX_TROUBLES:
            raise TooMuchTrouble

    async def sampled(
        self, server: Server, ids: Ids, limit: int, parameters: Mapping[str, object]
    ) -> Generation | None:
        """One answer drawn with these parameters, in a namespace of its own; None, and a note, where the server answers
        400 and names one of their penalties: what it refuses, it does not serve wrongly. Raises Trouble."""
        try:
            return await server.generate(ids, max_new_tokens=limit, extra_key=fresh_key(), sampling=parameters)
        except Trouble as trouble:
            if trouble.code != "http-400" or not any(n in parameters and n in trouble.message for n in PENALTIES):
                raise
            shown = f"refused, so not judged: penalties ({trouble.message})"
            self.evidence.note_once("penalties-refused", shown)
            return None

    def checked(self, got: Generation, where: str, prompt_tokens: int, limit: int) -> Ids | None:
        """The output's tokens; None where they cannot be judged. What is wrong with it goes into the evidence."""
        wrong = judge.wrong_output(
            got,
            prompt_tokens=prompt_tokens,
            max_new_tokens=limit,
            vocab_size=self.facts.vocab_size,
            context=self.facts.context,
        )
        if wrong is not None:
            code, message, proven = wrong
            self.evidence.reason("fail" if proven else "inconclusive", code, f"{where}: {message}")
            if code in NOT_SCORED:
                return None
        if got.finish == "stop" and not isinstance(got.matched, int):
            self.evidence.reason("inconclusive", "stop-unnamed", f"{where}: the stop token is not told, so not judged")
        return judge.sequence(got)

    async def positions(self, prompt: Ids, tokens: Ids, name: str) -> list[Position]:
        """Every token of an output against the target, by one prefill. Raises Trouble."""
        whole = prompt + tokens
        reply = await self.server.score(whole, start=len(prompt) - 1, texts=self.facts.tokenizer)
        return self.validated(whole, len(prompt), reply, name)

    def validated(self, whole: Ids, first: int, reply: Scored, name: str) -> list[Position]:
        """judge.positions, with Trouble for scores that contradict the request or themselves."""
        try:
            return judge.positions(whole, first, reply, self.facts.vocab_size)
        except Malformed as error:
            raise Trouble("scores", f"{name}: {error}") from error

    async def explain(self, group: Group, prompt: int, tokens: Ids) -> list[Position] | None:
        """The positions, asked for now if need be; None where the server tells no logprobs. Raises Trouble."""
        if (found := group.score(prompt, tokens)) is not None or not self.facts.logprobs or not tokens:
            return found
        found = await self.positions(group.ids[prompt], tokens, group.names[prompt])
        group.scores[prompt, tokens] = found
        return found
