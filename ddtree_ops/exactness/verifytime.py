"""Verify-time logprobs: what the tree's verify gave the tokens that it emitted, against what a prefill gives them.

A verify that attends to the wrong KV shows here even where the argmax came out right. Asked of a few prompts only:
``return_logprob`` may take another way through a server than the requests that are to be proven.
"""

from __future__ import annotations

from ddtree_ops.exactness import findings, judge
from ddtree_ops.exactness.client import Trouble, fresh_key
from ddtree_ops.exactness.evidence import Ids
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.verdict import Finding
from ddtree_ops.exactness.work import Group, Work

METHOD = "verify-logprob"
PROMPTS = 8


async def judge_group(work: Work, group: Group, load: Load) -> None:
    """Generates again with logprobs at ``load`` and holds them against the prefill's, token by token."""

    async def act(prompt: int) -> None:
        ids, name = group.ids[prompt], group.names[prompt]
        limit, where = group.limits[prompt], f"{name} at {load}, with logprobs"
        try:
            got = await work.server.generate(ids, max_new_tokens=limit, extra_key=fresh_key(), logprobs=True)
        except Trouble as trouble:
            if trouble.code != "logprobs-refused":
                raise
            work.evidence.note_once(METHOD, f"verify-time logprobs are unchecked: {trouble.message}")
            return
        tokens = work.checked(got, where, len(ids), limit)
        if tokens is None:
            return
        if got.logprobs is None:
            work.evidence.note_once(METHOD, "verify-time logprobs are unchecked: the server does not tell them")
            return
        found = await work.explain(group, prompt, tokens)
        for one in compared(name, load, tokens, got.logprobs, found or [], work.plan.dtype, work.evidence.epsilon):
            work.evidence.judged(METHOD, load).add(one)
            work.evidence.finding(one)
        work.evidence.judged(METHOD, load).judged += min(len(got.logprobs), len(found or []))

    await work.each(load.concurrency, range(min(PROMPTS, len(group.ids))), act, f"logprobs at {load}")


def compared(
    name: str,
    load: Load,
    tokens: Ids,
    logprobs: tuple[float | None, ...],
    found: list[judge.Position],
    dtype: str,
    eps: float,
) -> list[Finding]:
    """Tokens that are not the target's choice, and tokens whose two logprobs differ beyond the dtype's tolerance.

    ``logprobs`` may lack the stop token's. A logprob that is not finite on either side is beyond it. Pure.
    """
    wrong = findings.of_positions(METHOD, name, load, found, eps)
    limit = judge.logprob_tolerance(dtype)
    for i, (verified, position) in enumerate(zip(logprobs, found, strict=False)):
        if verified is None or position.logprob is None or abs(verified - position.logprob) > limit:
            wrong.append(findings.of_logprobs(METHOD, name, load, tokens[i], position, verified, found))
    return wrong
