"""Same seed: above temperature 0, AR, chain and tree draw the same tokens where a draw is fixed by seed and position.

Every prompt has parameters other than its neighbours', two in eight are greedy: what is read from another row shows.
Only in float32: in 16 bits rounding moves so many draws that equality says nothing; the distribution test judges there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ddtree_ops.exactness import findings, judge
from ddtree_ops.exactness.client import Server, Trouble, fresh_key
from ddtree_ops.exactness.golden import Golden, Recorded, prompt_hash
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.work import EDGE, Group, Work

METHOD = "same-seed"
VERSION = "sampling-v1"
PROMPTS = 16
MAX_TOKENS = 48
EXCUSED = 1
"""Outputs that may differ: a draw whose two best lie within fp32 rounding falls either way, in about 1 run of 1,000."""

TABLE: tuple[Mapping[str, float | int], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.6, "frequency_penalty": 2.0},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 5, "frequency_penalty": 1.0},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
)
"""Changes with VERSION: goldens name it."""

Expected = Mapping[str, Recorded]


def parameters(row: int, name: str) -> dict[str, object]:
    """What the ``row``-th of a group's sampled prompts is sampled with; its seed is its name's."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
    return {**TABLE[row % len(TABLE)], "sampling_seed": seed}


def sampled(group: Group) -> list[int]:
    """The prompts that are sampled, in the order of TABLE's rows: what was recorded may lack the gate's own prompt."""
    return [prompt for prompt, name in enumerate(group.names) if name != EDGE][:PROMPTS]


async def answers(work: Work, server: Server, group: Group, concurrency: int, what: str) -> dict[str, Recorded]:
    """The sampled prompts' answers by name; those are missing where the server made trouble."""

    async def act(item: tuple[int, int]) -> tuple[str, Recorded] | None:
        row, prompt = item
        ids, name = group.ids[prompt], group.names[prompt]
        limit = min(MAX_TOKENS, group.limits[prompt])
        got = await work.sampled(server, ids, limit, parameters(row, name))
        tokens = None if got is None else work.checked(got, f"{name}, sampled", len(ids), limit)
        if got is None or tokens is None:
            return None
        return name, Recorded(prompt=prompt_hash(ids), tokens=tokens, finish=got.finish)

    made = await work.each(concurrency, list(enumerate(sampled(group))), act, what)
    return dict(one for one in made if one is not None)


async def seeds_hold(work: Work, server: Server, group: Group) -> bool:
    """Whether a server gives one seed's answer twice; False too for one that refuses such a request. Raises Trouble."""
    twice, limit = [], min(MAX_TOKENS, group.limits[0])
    for _ in range(2):
        given = parameters(0, group.names[0])
        try:
            got = await server.generate(group.ids[0], max_new_tokens=limit, extra_key=fresh_key(), sampling=given)
        except Trouble as trouble:
            if trouble.code != "http-400":
                raise
            return False
        twice.append(got.output_ids)
    return twice[0] == twice[1]


def of_golden(work: Work, group: Group, golden: Golden) -> Expected | None:
    """What the golden has for the group's prompts; None (and on record) where it has nothing that can be compared."""
    if golden.sampling != VERSION:
        was = golden.sampling or "none"
        message = (
            f"the golden has no sampled answers of {VERSION} ({was}): its server had no positional seeds, or it is old"
        )
        work.evidence.reason("inconclusive", "no-sampled", message)
        return None
    known = {name: prompt_hash(ids) for name, ids in zip(group.names, group.ids, strict=True)}
    return {name: one for name, one in golden.sampled.items() if known.get(name) == one.prompt}


async def judge_group(work: Work, group: Group, expected: Expected, loads: Sequence[Load]) -> None:
    """The same seeds at every load: more than EXCUSED outputs that differ fail, and a greedy one always."""
    for load in loads:
        tally = work.evidence.judged(METHOD, load)
        differing: list[tuple[int, str, Recorded, Recorded]] = []
        made = await answers(work, work.server, group, load.concurrency, f"{METHOD} at {load}")
        for row, prompt in enumerate(sampled(group)):
            name = group.names[prompt]
            got, wanted = made.get(name), expected.get(name)
            if got is None or wanted is None:
                continue
            at = judge.first_difference(got.tokens, wanted.tokens)
            tally.judged += len(got.tokens) if at is None else at + 1
            if at is not None:
                differing.append((row, name, got, wanted))
        for row, name, got, wanted in differing:
            greedy = not TABLE[row % len(TABLE)]["temperature"]
            one = findings.of_difference(
                METHOD,
                name,
                load,
                (got.tokens, wanted.tokens),
                (None, None),
                work.evidence.epsilon,
                "fail" if greedy or len(differing) > EXCUSED else "near-tie",
            )
            if one is not None:
                tally.add(one)
                work.evidence.finding(one)
