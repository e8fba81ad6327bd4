"""The run itself: prompts in groups through every load, then the methods, then what the outputs say of one another.

In groups, so that memory does not grow with the number of prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddtree_ops.exactness import (
    against,
    distribution,
    findings,
    judge,
    replay,
    sameseed,
    selfscore,
    stops,
    structure,
    verifytime,
)
from ddtree_ops.exactness.client import Server, Trouble, fresh_key
from ddtree_ops.exactness.evidence import Evidence, Ids
from ddtree_ops.exactness.golden import Golden, Recording, prompt_hash
from ddtree_ops.exactness.mixed import Turn, schedule
from ddtree_ops.exactness.plan import GatePlan, Load, Prompt
from ddtree_ops.exactness.prompts import stand_in_ids
from ddtree_ops.exactness.wire import Generation
from ddtree_ops.exactness.work import EDGE, Facts, Group, Output, Progress, Work

GROUP = 32
SAMPLES = 24
EDGE_CONTEXT = 4096
"""Tokens of the longest context whose limit is tried: a prefill of that length must stay cheap."""
SUFFIX_TOKENS = 8


class Rounds:
    """One run over a plan's prompts. ``run`` fills the evidence; raises TooMuchTrouble, and nothing else for what a
    server does. May be cancelled anywhere.
    """

    def __init__(
        self,
        server: Server,
        evidence: Evidence,
        facts: Facts,
        progress: Progress | None,
        baseline: Server | None,
        recording: Recording | None,
    ) -> None:
        """``recording`` collects the outputs of the first load."""
        self._baseline = baseline
        self._recording = recording
        self._work = Work(server, evidence, facts, progress, _foreseen(evidence.plan, facts))
        self._evidence = evidence
        self._plan = evidence.plan
        self._facts = facts
        self._steady = [load for load in self._plan.loads if not load.mixed]
        self._edged = False
        self._pools = distribution.Pools()
        self._sampled: Counter[Load] = Counter()
        self._widest = max(self._plan.concurrency)

    async def run(self) -> None:
        prompts = self._plan.prompts
        for start in range(0, len(prompts), GROUP):
            await self._group(prompts[start : start + GROUP])
        if distribution.METHOD in self._plan.sampled_methods:
            distribution.conclude(self._work, self._pools)

    async def _group(self, prompts: Sequence[Prompt]) -> None:
        encoded = await self._work.each(self._widest, prompts, self._encode, "tokenise")
        known = [(prompt.id, ids) for prompt, ids in zip(prompts, encoded, strict=True) if ids]
        if not known:
            return
        self._evidence.prompts += len(known)
        if (edge := self._edge(known)) is not None:
            # In the middle, so that it has company whose end is not near.
            known.insert(len(known) // 2, (EDGE, edge))
        most, context = self._plan.max_new_tokens, self._facts.context
        # One token short of the context: servers differ in whether the last one may be used.
        limits = [most if context is None else max(1, min(most, context - 1 - len(ids))) for _, ids in known]
        group = Group([name for name, _ in known], [ids for _, ids in known], limits)
        for load in self._plan.loads:
            group.outputs[load] = await self._generate(group, load)
            # At once: what comes later may take the cache's place.
            if load == Load(self._widest) and self._plan.second_turn_tokens:
                await self._second_turns(group, load)
        if selfscore.METHOD in self._facts.methods:
            await selfscore.judge_group(self._work, group)
            if self._plan.algorithm != "none":
                await verifytime.judge_group(self._work, group, Load(self._widest))
        if replay.METHOD in self._facts.methods:
            await replay.judge_group(self._work, group)
        if against.GOLDEN in self._facts.methods and self._plan.golden is not None:
            await self._against_golden(group, self._plan.golden)
        if self._baseline is not None:
            expected = await against.of_baseline(self._work, group, self._baseline)
            await against.judge_group(self._work, group, against.BASELINE, expected)
        await self._compare(group)
        self._work.stop_if_hopeless()
        await stops.judge_group(self._work, group, self._known(group), self._steady)
        if distribution.METHOD in self._plan.sampled_methods:
            await distribution.sample_group(self._work, group, Load(self._widest), self._pools)
        if sameseed.METHOD in self._plan.sampled_methods:
            await self._same_seed(group)
        if self._recording is not None:
            await self._record_sampled(group, self._recording)
            for output in group.outputs[self._plan.loads[0]]:
                name, ids = group.names[output.prompt], group.ids[output.prompt]
                self._recording.add(name, ids, output.tokens, output.finish, output.verify_steps)

    async def _against_golden(self, group: Group, golden: Golden) -> None:
        expected = against.of_golden(self._work, group, golden)
        await against.judge_group(self._work, group, against.GOLDEN, expected)
        tree = self._plan.tree
        if tree is None or self._plan.dtype != "float32" or Load(1) not in group.outputs:
            return
        counts = golden.verify_counts.get(tree.shape)
        if counts is None:
            self._evidence.note_once("no-verify-counts", f"the golden has no verify counts for {tree.shape}")
        else:
            against.judge_verify_counts(self._work, group, counts, Load(1))

    async def _same_seed(self, group: Group) -> None:
        if self._plan.dtype != "float32":
            self._evidence.reason("inconclusive", "same-seed-dtype", "same-seed proves nothing below float32")
            return
        for server, what in ((self._work.server, "the server"), (self._baseline, "the baseline")):
            if server is not None and not await sameseed.seeds_hold(self._work, server, group):
                message = f"same-seed: {what} gives two answers to one seed, so it has no positional seeds"
                self._evidence.reason("inconclusive", "no-seeds", message)
                return
        if self._plan.golden is not None:
            recorded = sameseed.of_golden(self._work, group, self._plan.golden)
            if recorded is not None:
                await sameseed.judge_group(self._work, group, recorded, self._steady)
        if self._baseline is not None:
            told = await sameseed.answers(self._work, self._baseline, group, self._widest, "baseline, sampled")
            await sameseed.judge_group(self._work, group, told, self._steady)

    async def _record_sampled(self, group: Group, recording: Recording) -> None:
        """The answers above temperature 0 in float32, where seeds fix them; a server without such seeds has none."""
        if (self._plan.algorithm, self._plan.dtype) != ("none", "float32"):
            return
        if await sameseed.seeds_hold(self._work, self._work.server, group):
            recording.sampling = sameseed.VERSION
            recording.sampled |= await sameseed.answers(self._work, self._work.server, group, 1, "record, sampled")

    def _edge(self, known: Sequence[tuple[str, Ids]]) -> Ids | None:
        """A prompt so long that its output ends at the context's limit, made of the first group's prompts, once."""
        context, room = self._facts.context, self._plan.max_new_tokens // 2
        if self._edged or context is None or not 4 * room < context <= EDGE_CONTEXT:
            return None
        self._edged = True
        whole = [token for _, ids in known for token in ids]
        return tuple(whole[i % len(whole)] for i in range(context - 1 - room))

    def _known(self, group: Group) -> list[Ids | None]:
        """What each prompt's output should be: the golden's, else what came at the first load (judged by itself)."""
        first = {output.prompt: output.tokens for output in group.outputs[self._plan.loads[0]]}
        golden = self._plan.golden.prompts if self._plan.golden is not None else {}
        known: list[Ids | None] = []
        for i, (name, ids) in enumerate(zip(group.names, group.ids, strict=True)):
            recorded = golden.get(name)
            same = recorded is not None and recorded.prompt == prompt_hash(ids)
            known.append(recorded.tokens if recorded is not None and same else first.get(i))
        return known

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
            return await self._work.server.encode(text, by_scoring=self._facts.logprobs)
        if vocab is None:
            raise Trouble("no-vocabulary", "no tokenizer is to be had there, and the vocabulary's size is not told")
        return stand_in_ids(text, vocab)

    async def _generate(self, group: Group, load: Load) -> list[Output]:
        """Every prompt once; more often where that is needed to have enough requests in flight."""
        self._work.stop_if_hopeless()

        # In the mixed load all share one namespace, as users' requests do: cached prefixes are met and given up.
        shared = fresh_key()

        async def act(turn: Turn) -> Output | None:
            if turn.broken_off:
                ids = group.ids[turn.prompt]
                await self._work.server.break_off(ids, max_new_tokens=turn.limit, extra_key=shared)
                return None
            return await self._output(group, load, turn, shared if load.mixed else fresh_key())

        count = len(group.ids)
        # What is recorded is recorded whole: who compares with it may have other loads.
        recorded = self._recording is not None and load == self._plan.loads[0]
        limits = self._filling(group) if load == Load(self._widest) and not recorded else group.limits
        turns = [Turn(i % count, limits[i % count], False) for i in range(max(count, load.concurrency))]
        if load.mixed:
            turns = schedule(group.limits, load.concurrency)
        made = await self._work.each(load.concurrency, turns, act, f"generate at {load}")
        outputs = [output for output in made if output is not None]
        for output in outputs:
            inside = judge.stop_inside(output.tokens, frozenset(self._work.stops))
            if inside is not None:
                where = f"{group.names[output.prompt]} at {load}, position {inside}"
                self._evidence.reason("fail", "stop-inside", f"{where}: stop token {output.tokens[inside]} passed over")
        return outputs

    def _filling(self, group: Group) -> list[int]:
        """Limits before second turns: every second prompt and its output fill whole pages of the cache.

        What an engine keeps of a full last page (the bonus token's KV, never written) shows only then.
        """
        limits = list(group.limits)
        for i in range(0, len(limits), 2):
            over = (len(group.ids[i]) + limits[i]) % self._facts.page
            if self._plan.second_turn_tokens and over <= limits[i] - 2:
                limits[i] -= over
        return limits

    async def _output(self, group: Group, load: Load, turn: Turn, key: str) -> Output | None:
        ids = group.ids[turn.prompt]
        got = await self._work.server.generate(ids, max_new_tokens=turn.limit, extra_key=key)
        self._evidence.tallies[load].add_output(got)
        where = f"{group.names[turn.prompt]} at {load}"
        tokens = self._work.checked(got, where, len(ids), turn.limit)
        if tokens is None:
            return None
        if got.finish == "stop" and isinstance(got.matched, int):
            self._work.stops.add(got.matched)
        if turn.limit == self._plan.max_new_tokens:  # cut to other lengths they differ whatever the engine does
            self._evidence.seen(ids, tokens)
        self._check_commits(got, where)
        await self._sample_structure(load)
        return Output(turn.prompt, tokens, turn.limit, key, got.finish, got.verify_steps)

    def _check_commits(self, got: Generation, where: str) -> None:
        """A step adds at most block_size tokens; the first token comes from the prefill."""
        tree, steps = self._plan.tree, got.verify_steps
        if tree is not None and steps is not None and len(got.output_ids) - 1 > steps * tree.block_size:
            message = f"{where}: {len(got.output_ids)} tokens in {steps} verify steps of at most {tree.block_size}"
            self._evidence.reason("fail", "commit-length", message)

    async def _sample_structure(self, load: Load) -> None:
        """After a request, what the last step executed; a server that runs many requests is not asked for each."""
        if self._evidence.executed_told and self._sampled[load] < SAMPLES:
            self._sampled[load] += 1
            shown = structure.executed(await self._work.server.info("server_info"), load.concurrency)
            if shown is not None:
                self._evidence.executed[shown] += 1

    async def _compare(self, group: Group) -> None:
        """Every output against the same prompt's at the first load: greedy text must not depend on company.

        Where self-score has no score of one of the two, trouble is on record already: the difference proves nothing.
        """
        reference: dict[int, Output] = {}
        pairs: list[tuple[Load, Output, Output]] = []
        for load, outputs in group.outputs.items():
            for output in outputs:
                first = reference.setdefault(output.prompt, output)
                if first is not output:
                    self._evidence.compared += 1
                    agreed = judge.first_difference(*_as_far_as_both(output, first))
                    self._evidence.judged("concurrency", load).judged += (
                        len(output.tokens) if agreed is None else agreed
                    )
                    if agreed is not None:
                        pairs.append((load, output, first))

        async def act(pair: tuple[Load, Output, Output]) -> None:
            load, output, first = pair
            sides = [group.score(one.prompt, one.tokens) for one in (output, first)]
            if selfscore.METHOD in self._facts.methods and None in sides:
                return
            mine, other = [await self._work.explain(group, one.prompt, one.tokens) for one in (output, first)]
            self._evidence.differing += 1
            one = findings.of_difference(
                "concurrency",
                group.names[output.prompt],
                load,
                _as_far_as_both(output, first),
                (mine, other),
                self._evidence.epsilon,
                self._work.unscored,
            )
            if one is not None:
                self._evidence.judged("concurrency", load).add(one)
                self._evidence.finding(one)

        await self._work.each(1, pairs, act, "explain")

    async def _second_turns(self, group: Group, load: Load) -> None:
        """Asks on after each output, once through its cache and once fresh: KV left corrupt makes them disagree."""
        self._work.stop_if_hopeless()
        limit = self._plan.second_turn_tokens

        async def act(output: Output) -> None:
            prompt, name = group.ids[output.prompt], f"{group.names[output.prompt]} (second turn)"
            context = self._facts.context
            if context is not None and len(prompt) + len(output.tokens) + SUFFIX_TOKENS + limit >= context:
                return
            turn = prompt + output.tokens + prompt[:SUFFIX_TOKENS]
            answers: list[Ids] = []
            for key in (output.key, fresh_key()):
                got = await self._work.server.generate(turn, max_new_tokens=limit, extra_key=key)
                tokens = self._work.checked(got, f"{name} at {load}", len(turn), limit)
                if tokens is None:
                    return
                answers.append(tokens)
                if key == output.key and got.cached_tokens:
                    self._evidence.second_turns_cached += 1
            self._evidence.second_turns += 1
            self._evidence.judged("second-turn", load).judged += len(answers[1])
            if answers[0] != answers[1]:
                self._evidence.second_turns_differing += 1
                await self._second_turn_differs(turn, (answers[0], answers[1]), name, load)

        outputs = list({output.prompt: output for output in group.outputs[load]}.values())
        await self._work.each(self._widest, outputs, act, "second turn")

    async def _second_turn_differs(self, turn: Ids, answers: tuple[Ids, Ids], name: str, load: Load) -> None:
        eps = self._evidence.epsilon
        sides: tuple[list[judge.Position] | None, list[judge.Position] | None] = (None, None)
        if self._facts.logprobs:
            cached, fresh = answers
            sides = (await self._work.positions(turn, cached, name), await self._work.positions(turn, fresh, name))
        one = findings.of_difference("second-turn", name, load, answers, sides, eps, self._work.unscored)
        if one is not None:
            self._evidence.judged("second-turn", load).add(one)
            self._evidence.finding(one)
        for side in sides:
            for found in findings.of_positions("second-turn", name, load, side or (), eps):
                self._evidence.finding(found)


def _foreseen(plan: GatePlan, facts: Facts) -> int:
    """Steps of a run without incidents; a replay is one a token."""
    a_prompt = 1 + (1 if plan.second_turn_tokens else 0) + (1 if plan.baseline else 0)
    a_prompt += 1 if selfscore.METHOD in facts.methods else 0
    a_prompt += plan.max_new_tokens if replay.METHOD in facts.methods else 0
    with_logprobs = selfscore.METHOD in facts.methods and plan.algorithm != "none"
    steps = 0
    for start in range(0, len(plan.prompts), GROUP):
        size = len(plan.prompts[start : start + GROUP])
        if distribution.METHOD in plan.sampled_methods:
            steps += distribution.ROUNDS * size
        if sameseed.METHOD in plan.sampled_methods:
            steps += min(size, sameseed.PROMPTS) * sum(not load.mixed for load in plan.loads)
        steps += size * a_prompt + (min(size, verifytime.PROMPTS) if with_logprobs else 0)
        for load in plan.loads:
            turns = max(size, load.concurrency)
            steps += len(schedule([2] * size, load.concurrency)) if load.mixed else turns + min(size, stops.PROMPTS)
    return steps


def _as_far_as_both(output: Output, other: Output) -> tuple[Ids, Ids]:
    """Two answers to one prompt, up to where both were asked to go."""
    limit = min(output.limit, other.limit)
    return output.tokens[:limit], other.tokens[:limit]
