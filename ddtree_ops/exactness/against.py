"""Against a golden or a baseline: the outputs held against what a server without speculation answered.

Catches what verify and prefill have wrong in common. An output is judged up to its first difference, which the scores
explain where the server tells them: what follows has another past.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.exactness import findings, judge
from ddtree_ops.exactness.client import Server, fresh_key
from ddtree_ops.exactness.golden import Golden, Recorded, prompt_hash
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.work import Group, Output, Work

GOLDEN = "golden"
BASELINE = "baseline"
Expected = Sequence[Recorded | None]


def of_golden(work: Work, group: Group, golden: Golden) -> Expected:
    """The golden's answers to the group's prompts; a prompt that it lacks or that has other ids gets None."""
    expected: list[Recorded | None] = []
    for name, ids in zip(group.names, group.ids, strict=True):
        recorded = golden.prompts.get(name)
        if recorded is not None and recorded.prompt != prompt_hash(ids):
            message = f"{name}: its ids are not those that were recorded (another tokenizer?), so it is not compared"
            work.evidence.reason("inconclusive", "golden-prompt", message)
            recorded = None
        elif recorded is None:
            work.evidence.reason("inconclusive", "golden-prompt", f"{name} is not in the golden")
        expected.append(recorded)
    return expected


async def of_baseline(work: Work, group: Group, baseline: Server) -> Expected:
    """The same prompts asked of a running server."""

    async def act(prompt: int) -> Recorded | None:
        ids, limit = group.ids[prompt], group.limits[prompt]
        got = await baseline.generate(ids, max_new_tokens=limit, extra_key=fresh_key())
        tokens = work.checked(got, f"{group.names[prompt]} on the baseline", len(ids), limit)
        if tokens is None:
            return None
        return Recorded(prompt=prompt_hash(ids), tokens=tokens, finish=got.finish)

    return await work.each(max(work.plan.concurrency), range(len(group.ids)), act, "baseline")


async def judge_group(work: Work, group: Group, method: str, expected: Expected) -> None:
    """Every output of the group against what is expected of its prompt."""
    differing: list[tuple[Load, Output, Recorded]] = []
    for load, outputs in group.outputs.items():
        tally = work.evidence.judged(method, load)
        for output in outputs:
            recorded = expected[output.prompt]
            if recorded is None:
                continue
            at = judge.first_difference(output.tokens, recorded.tokens[: output.limit])
            tally.judged += len(output.tokens) if at is None else at + 1
            if at is not None:
                differing.append((load, output, recorded))

    async def act(item: tuple[Load, Output, Recorded]) -> None:
        load, output, recorded = item
        wanted = recorded.tokens[: output.limit]
        mine = await work.explain(group, output.prompt, output.tokens)
        other = await work.explain(group, output.prompt, wanted)
        one = findings.of_difference(
            method,
            group.names[output.prompt],
            load,
            (output.tokens, wanted),
            (mine, other),
            work.evidence.epsilon,
            work.unscored,
        )
        if one is not None:
            work.evidence.judged(method, load).add(one)
            work.evidence.finding(one)

    await work.each(1, differing, act, "explain")


def judge_verify_counts(work: Work, group: Group, counts: dict[str, int], load: Load) -> None:
    """The verify steps of each output against those recorded for the same tree: they show what changes no token."""
    for output in group.outputs.get(load, []):
        name = group.names[output.prompt]
        wanted = counts.get(name)
        whole = output.limit == group.limits[output.prompt]
        if wanted is None or output.verify_steps is None or not whole:
            continue
        work.evidence.verify_counts += 1
        if output.verify_steps != wanted:
            message = f"{name} at {load} took {output.verify_steps} verify steps; recorded are {wanted} for this tree"
            work.evidence.reason("fail", "verify-count", message)
