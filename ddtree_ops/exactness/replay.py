"""Replay: prompt + output[:t] sent again for one token, for every t, each in a cache namespace of its own.

The first token after a prefill never went through the tree, so it is what the target says there. Works on any server,
logprobs or not; tells no gaps, and costs one short request a token (design.md, "Exactness").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_ops.exactness import findings, judge
from ddtree_ops.exactness.client import Trouble, fresh_key
from ddtree_ops.exactness.evidence import Ids
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.work import Group, Output, Work

METHOD = "replay"
Replayed = dict[tuple[int, Ids], list[int | None]]


@dataclass(frozen=True)
class Asked:
    """One token to ask for: what follows ``tokens[:at]``."""

    prompt: int
    tokens: Ids
    at: int


async def judge_group(work: Work, group: Group) -> None:
    """Replays every distinct output of the group and judges each of its tokens."""
    replayed = await _replay(work, group)
    disagreeing: list[tuple[Load, Output, int, int]] = []
    for load, outputs in group.outputs.items():
        tally = work.evidence.judged(METHOD, load)
        for output in outputs:
            answers = _answers(replayed, output)
            tally.judged += sum(answer is not None for answer in answers)
            for at, (got, answer) in enumerate(zip(output.tokens, answers, strict=False)):
                if answer is not None and answer != got:
                    disagreeing.append((load, output, at, answer))

    async def act(item: tuple[Load, Output, int, int]) -> None:
        load, output, at, answer = item
        found = await work.explain(group, output.prompt, output.tokens)
        one = findings.of_token(
            METHOD,
            group.names[output.prompt],
            load,
            (output.tokens[at], answer, at),
            found,
            work.evidence.epsilon,
            work.unscored,
        )
        work.evidence.judged(METHOD, load).add(one)
        work.evidence.finding(one)

    await work.each(1, disagreeing, act, "explain")


async def _replay(work: Work, group: Group) -> Replayed:
    """What the target says after each beginning of each distinct output; None where the server made trouble."""
    replayed: Replayed = {}
    asked: list[Asked] = []
    before: dict[int, list[Ids]] = {}
    shared: dict[tuple[int, Ids], tuple[Ids, int] | None] = {}
    for prompt, tokens in group.distinct():
        earlier = before.setdefault(prompt, [])
        nearest = max(earlier, key=lambda other: _common(other, tokens), default=None)
        # The answer at t depends on what is before t: up to and at the first difference an earlier output has it.
        start = 0 if nearest is None else _common(nearest, tokens) + 1
        shared[prompt, tokens] = None if nearest is None else (nearest, start)
        asked += [Asked(prompt, tokens, at) for at in range(start, len(tokens))]
        earlier.append(tokens)

    async def act(one: Asked) -> int:
        ids = group.ids[one.prompt] + one.tokens[: one.at]
        got = await work.server.generate(ids, max_new_tokens=1, extra_key=fresh_key())
        where = f"replay of {group.names[one.prompt]}, position {one.at}"
        tokens = work.checked(got, where, len(ids), 1)
        if not tokens:
            raise Trouble("no-token", f"{where}: no token came back")
        return tokens[0]

    answers = iter(await work.each(max(work.plan.concurrency), asked, act, "replay"))
    for (prompt, tokens), origin in shared.items():
        known = [] if origin is None else replayed[prompt, origin[0]][: origin[1]]
        replayed[prompt, tokens] = known + [next(answers) for _ in range(len(tokens) - len(known))]
    return replayed


def _common(left: Ids, right: Ids) -> int:
    at = judge.first_difference(left, right)
    return len(left) if at is None else at


def _answers(replayed: Replayed, output: Output) -> Sequence[int | None]:
    for (prompt, tokens), answers in replayed.items():
        if prompt == output.prompt and tokens[: len(output.tokens)] == output.tokens:
            return answers[: len(output.tokens)]
    return []
