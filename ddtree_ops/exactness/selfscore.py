"""Self-score: the server's greedy outputs, held against the same server's prefill of them.

The prefill path uses neither the tree's mask nor the drafter, so a corrupt verify shows without a second model
(design.md, "Exactness").
"""

from __future__ import annotations

from ddtree_ops.exactness import findings
from ddtree_ops.exactness.evidence import Ids
from ddtree_ops.exactness.judge import Position
from ddtree_ops.exactness.work import Group, Work

METHOD = "self-score"


async def judge_group(work: Work, group: Group) -> None:
    """Scores every distinct output of the group once and judges each of its tokens."""

    async def act(item: tuple[int, Ids]) -> list[Position]:
        prompt, tokens = item
        return await work.positions(group.ids[prompt], tokens, group.names[prompt])

    distinct = group.distinct()
    scored = await work.each(max(work.plan.concurrency), distinct, act, "score")
    group.scores.update({item: found for item, found in zip(distinct, scored, strict=True) if found is not None})
    for load, outputs in group.outputs.items():
        tally = work.evidence.judged(METHOD, load)
        for output in outputs:
            found = group.score(output.prompt, output.tokens) or []
            tally.judged += len(found)
            tally.ties += sum(position.gap == 0.0 and position.best != position.emitted for position in found)
            name = group.names[output.prompt]
            for one in findings.of_positions(METHOD, name, load, found, work.evidence.epsilon):
                tally.add(one)
                work.evidence.finding(one)
