"""Stops: each prompt once more with a stop token that its output is known to reach in the middle.

A stop token then falls inside accepted paths, where an engine that looks only at a path's end passes it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_ops.exactness import findings, judge
from ddtree_ops.exactness.client import fresh_key
from ddtree_ops.exactness.evidence import Ids
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.work import Group, Work

METHOD = "stop"
PROMPTS = 8


@dataclass(frozen=True)
class Stop:
    """``expected``: the output up to and with the stop token, its last."""

    prompt: int
    expected: Ids


def choose(expected: Sequence[Ids | None]) -> list[Stop]:
    """At most PROMPTS stops, one a prompt, at places that vary: each token's first occurrence, neither first nor last.

    The first token comes from the prefill, and the last ends the output anyway. Pure.
    """
    chosen: list[Stop] = []
    for prompt, tokens in enumerate(expected):
        places = [at for at in range(1, len(tokens or ()) - 1) if tokens and tokens[at] not in tokens[:at]]
        if tokens and places and len(chosen) < PROMPTS:
            wanted = len(tokens) * (2 + 3 * len(chosen) % 5) // 8
            at = min(places, key=lambda place: abs(place - wanted))
            chosen.append(Stop(prompt, tokens[: at + 1]))
    return chosen


async def judge_group(work: Work, group: Group, expected: Sequence[Ids | None], loads: Sequence[Load]) -> None:
    """Asks for every stop at every load and judges the outputs by what is expected, their ends included."""
    stops = choose(expected)
    for load in loads:

        async def act(stop: Stop, load: Load = load) -> None:
            ids, name = group.ids[stop.prompt], group.names[stop.prompt]
            token, limit = stop.expected[-1], group.limits[stop.prompt]
            got = await work.server.generate(ids, max_new_tokens=limit, extra_key=fresh_key(), stop_token_ids=(token,))
            where = f"{name} at {load}, stop token {token}"
            tokens = work.checked(got, where, len(ids), limit)
            if tokens is None:
                return
            tally = work.evidence.judged(METHOD, load)
            at = judge.first_difference(tokens, stop.expected)
            tally.judged += len(tokens) if at is None else at
            if at is None and (got.finish, got.matched) != ("stop", token):
                finish = f"finish reason {got.finish}, matched {got.matched}"
                work.evidence.reason("fail", "stop-finish", f"{where}: ended there, with {finish}")
            if at is None:
                return
            sides = (
                await work.explain(group, stop.prompt, tokens),
                await work.explain(group, stop.prompt, stop.expected),
            )
            outputs, eps = (tokens, stop.expected), work.evidence.epsilon
            one = findings.of_difference(METHOD, name, load, outputs, sides, eps, work.unscored)
            if one is not None:
                tally.add(one)
                work.evidence.finding(one)

        await work.each(load.concurrency, stops, act, f"stop at {load}")
