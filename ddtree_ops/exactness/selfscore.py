"""Self-score: the server's greedy outputs, held against the same server's prefill of them.

The prefill path uses neither the tree's mask nor the drafter, so a corrupt verify shows without a second model
(design.md, "Exactness"). Prompts go through in groups, so memory does not grow with their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddtree_ops.exactness import findings, judge
from ddtree_ops.exactness.client import Server, Trouble, fresh_key
from ddtree_ops.exactness.evidence import Evidence, Ids
from ddtree_ops.exactness.plan import Prompt
from ddtree_ops.exactness.prompts import stand_in_ids
from ddtree_ops.exactness.wire import Generation, Malformed

GROUP = 32
MAX_TROUBLES = 3
SUFFIX_TOKENS = 8
NOT_SCORED = ("id-outside-vocabulary", "not-finished", "prompt-changed", "empty-output")

T = TypeVar("T")
R = TypeVar("R")
Scores = dict[tuple[int, Ids], list[judge.Position]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Facts:
    """What the server told about itself. ``context``: its longest sequence, where known."""

    vocab_size: int | None
    context: int | None
    tokenizer: bool


@dataclass(frozen=True)
class Output:
    """One generated output. ``tokens``: with the stop token; ``key``: the cache namespace it was made under."""

    prompt: int
    tokens: Ids
    key: str


class TooMuchTrouble(Exception):
    """The server answers too little to go on; what was seen so far is in the evidence."""


class SelfScore:
    """One run over a plan's prompts. ``run`` fills the evidence; raises TooMuchTrouble, and nothing else for what a
    server does. May be cancelled anywhere.
    """

    def __init__(self, server: Server, evidence: Evidence, facts: Facts, progress: Progress | None) -> None:
        self._server = server
        self._evidence = evidence
        self._plan = evidence.plan
        self._facts = facts
        self._progress = progress
        self._stops = set(self._plan.stop_token_ids)
        self._names: list[str] = []
        self._ids: list[Ids] = []
        turns = 1 if self._plan.second_turn_tokens else 0
        self._total = len(self._plan.prompts) * (2 + len(self._plan.concurrency) + turns)
        self._done = 0

    async def run(self) -> None:
        prompts = self._plan.prompts
        for start in range(0, len(prompts), GROUP):
            await self._group(prompts[start : start + GROUP])

    async def _group(self, prompts: Sequence[Prompt]) -> None:
        widest = max(self._plan.concurrency)
        encoded = await self._each(widest, prompts, self._encode, "tokenise")
        known = [(prompt.id, ids) for prompt, ids in zip(prompts, encoded, strict=True) if ids]
        if not known:
            return
        self._names, self._ids = [name for name, _ in known], [ids for _, ids in known]
        self._evidence.prompts += len(known)
        outputs = {concurrency: await self._generate(concurrency) for concurrency in self._plan.concurrency}
        scores = await self._score(widest, [output for outs in outputs.values() for output in outs])
        for concurrency, outs in outputs.items():
            self._judge(concurrency, outs, scores)
        self._compare(outputs, scores)
        if self._plan.second_turn_tokens:
            await self._second_turns(widest, outputs[widest])

    async def _each(
        self, limit: int, items: Sequence[T], act: Callable[[T], Awaitable[R]], what: str
    ) -> list[R | None]:
        """``act`` on every item with ``limit`` in flight; None where the server made trouble, which is recorded."""
        results: list[R | None] = [None] * len(items)
        waiting = iter(enumerate(items))

        async def work() -> None:
            for i, item in waiting:
                if self._evidence.troubles >= MAX_TROUBLES:
                    return
                try:
                    results[i] = await act(item)
                except Trouble as trouble:
                    self._evidence.troubles += 1
                    self._evidence.reason("inconclusive", trouble.code, f"{what}: {trouble.message}")
                self._done = min(self._done + 1, self._total)
                if self._progress:
                    self._progress(what, self._done, self._total)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(items))):
                group.create_task(work())
        return results

    def _stop_if_hopeless(self) -> None:
        if self._evidence.troubles >= MAX_TROUBLES:
            raise TooMuchTrouble

    async def _encode(self, prompt: Prompt) -> Ids:
        vocab = self._facts.vocab_size
        if prompt.input_ids is not None:
            beyond = next((i for i in prompt.input_ids if vocab is not None and i >= vocab), None)
            if beyond is not None:
                # SGLang does not check ids when its tokenizer is skipped: one beyond the vocabulary kills the server.
                raise Trouble("prompt-id", f"prompt {prompt.id}: id {beyond} is outside the vocabulary of {vocab}")
            return prompt.input_ids
        text = prompt.text or ""
        if self._facts.tokenizer:
            return await self._server.encode(text)
        if vocab is None:
            raise Trouble("no-vocabulary", "the server skips its tokenizer and does not tell its vocabulary's size")
        return stand_in_ids(text, vocab)

    async def _generate(self, concurrency: int) -> list[Output]:
        """Every prompt once; more often where that is needed to have ``concurrency`` requests in flight."""
        self._stop_if_hopeless()
        tally = self._evidence.tallies[concurrency]

        async def act(prompt: int) -> Output | None:
            key = fresh_key()
            limit = self._plan.max_new_tokens
            got = await self._server.generate(self._ids[prompt], max_new_tokens=limit, extra_key=key)
            tally.add_output(got)
            where = f"{self._names[prompt]} at C={concurrency}"
            tokens = self._checked(got, where, len(self._ids[prompt]), limit)
            if tokens is None:
                return None
            self._evidence.seen(self._ids[prompt], tokens)
            return Output(prompt, tokens, key)

        wanted = [i % len(self._ids) for i in range(max(len(self._ids), concurrency))]
        made = await self._each(concurrency, wanted, act, f"generate at C={concurrency}")
        outputs = [output for output in made if output is not None]
        for output in outputs:
            inside = judge.stop_inside(output.tokens, frozenset(self._stops))
            if inside is not None:
                where = f"{self._names[output.prompt]} at C={concurrency}, position {inside}"
                self._evidence.reason("fail", "stop-inside", f"{where}: stop token {output.tokens[inside]} passed over")
        return outputs

    def _checked(self, got: Generation, where: str, prompt_tokens: int, limit: int) -> Ids | None:
        """The output's tokens; None where they cannot be judged. What is wrong with it goes into the evidence."""
        facts = self._facts
        wrong = judge.wrong_output(
            got, prompt_tokens=prompt_tokens, max_new_tokens=limit, vocab_size=facts.vocab_size, context=facts.context
        )
        if wrong is not None:
            code, message, proven = wrong
            self._evidence.reason("fail" if proven else "inconclusive", code, f"{where}: {message}")
            if code in NOT_SCORED:
                return None
        if got.finish == "stop" and isinstance(got.matched, int):
            self._stops.add(got.matched)
        elif got.finish == "stop":
            self._evidence.reason("inconclusive", "stop-unnamed", f"{where}: the stop token is not told, so not judged")
        return judge.sequence(got)

    async def _score(self, limit: int, outputs: Sequence[Output]) -> Scores:
        """Positions of every distinct output: one that two concurrencies share is scored once."""
        distinct = list(dict.fromkeys((output.prompt, output.tokens) for output in outputs if output.tokens))

        async def act(item: tuple[int, Ids]) -> list[judge.Position]:
            prompt, tokens = item
            return await self._positions(self._ids[prompt], tokens, self._names[prompt])

        scored = await self._each(limit, distinct, act, "score")
        return {item: found for item, found in zip(distinct, scored, strict=True) if found is not None}

    async def _positions(self, prompt: Ids, tokens: Ids, name: str) -> list[judge.Position]:
        whole = prompt + tokens
        reply = await self._server.score(whole, start=len(prompt) - 1, texts=self._facts.tokenizer)
        try:
            return judge.positions(whole, len(prompt), reply, self._facts.vocab_size)
        except Malformed as error:
            raise Trouble("scores", f"{name}: {error}") from error

    def _judge(self, concurrency: int, outputs: Sequence[Output], scores: Scores) -> None:
        tally, eps = self._evidence.tallies[concurrency], self._evidence.epsilon
        for output in outputs:
            found = scores.get((output.prompt, output.tokens), [])
            tally.judged += len(found)
            tally.ties += sum(position.gap == 0.0 and position.best != position.emitted for position in found)
            for one in findings.of_positions("self-score", self._names[output.prompt], concurrency, found, eps):
                tally.beyond += one.severity == "fail"
                tally.near_ties += one.severity == "near-tie"
                self._evidence.finding(one)

    def _compare(self, outputs: dict[int, list[Output]], scores: Scores) -> None:
        """Every output against the same prompt's at the first concurrency: greedy text must not depend on company.

        Where one of the two has no score, trouble is on record already, and the difference proves nothing.
        """
        reference: dict[int, Output] = {}
        for concurrency, outs in outputs.items():
            for output in outs:
                first = reference.setdefault(output.prompt, output)
                if first is output:
                    continue
                self._evidence.compared += 1
                sides = (scores.get((output.prompt, output.tokens)), scores.get((first.prompt, first.tokens)))
                if output.tokens == first.tokens or None in sides:
                    continue
                self._evidence.differing += 1
                name, eps, tokens = self._names[output.prompt], self._evidence.epsilon, (output.tokens, first.tokens)
                one = findings.of_difference("concurrency", name, concurrency, tokens, sides, eps)
                if one is not None:
                    self._evidence.finding(one)

    async def _second_turns(self, concurrency: int, outputs: Sequence[Output]) -> None:
        """Asks on after each output, once through its cache and once fresh: KV left corrupt makes them disagree."""
        self._stop_if_hopeless()
        limit = self._plan.second_turn_tokens

        async def act(output: Output) -> None:
            prompt, name = self._ids[output.prompt], f"{self._names[output.prompt]} (second turn)"
            context = self._facts.context
            if context is not None and len(prompt) + len(output.tokens) + SUFFIX_TOKENS + limit >= context:
                return
            turn = prompt + output.tokens + prompt[:SUFFIX_TOKENS]
            answers: list[Ids] = []
            for key in (output.key, fresh_key()):
                got = await self._server.generate(turn, max_new_tokens=limit, extra_key=key)
                tokens = self._checked(got, f"{name} at C={concurrency}", len(turn), limit)
                if tokens is None:
                    return
                answers.append(tokens)
                if key == output.key and got.cached_tokens:
                    self._evidence.second_turns_cached += 1
            self._evidence.second_turns += 1
            cached, fresh = answers
            if cached == fresh:
                return
            self._evidence.second_turns_differing += 1
            sides = (await self._positions(turn, cached, name), await self._positions(turn, fresh, name))
            eps = self._evidence.epsilon
            one = findings.of_difference("second-turn", name, concurrency, (cached, fresh), sides, eps)
            for found in [one] if one else []:
                self._evidence.finding(found)
            for side in sides:
                for found in findings.of_positions("second-turn", name, concurrency, side, eps):
                    self._evidence.finding(found)

        await self._each(concurrency, list({output.prompt: output for output in outputs}.values()), act, "second turn")
