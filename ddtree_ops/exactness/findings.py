"""From judged positions to findings with the evidence a person needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.exactness import judge
from ddtree_ops.exactness.judge import Position
from ddtree_ops.exactness.verdict import Finding

CONTEXT_TOKENS = 12
MAX_TEXT = 200


def of_positions(method: str, prompt: str, concurrency: int, found: Sequence[Position], eps: float) -> list[Finding]:
    """A finding for every position that is not the target's choice, in order."""
    findings = []
    for i, position in enumerate(found):
        grade = judge.severity(position.gap, eps)
        if grade != "exact":
            findings.append(
                Finding(
                    severity="fail" if grade == "fail" else "near-tie",
                    method=method,
                    prompt=prompt,
                    concurrency=concurrency,
                    position=position.index,
                    got=position.emitted,
                    expected=position.best,
                    gap=position.gap,
                    top_two_gap=position.top_two_gap,
                    got_text=position.emitted_text[:MAX_TEXT],
                    expected_text=position.best_text[:MAX_TEXT],
                    before=_before(found, i),
                )
            )
    return findings


def of_difference(
    method: str,
    prompt: str,
    concurrency: int,
    outputs: tuple[Sequence[int], Sequence[int]],
    scores: tuple[Sequence[Position] | None, Sequence[Position] | None],
    eps: float,
) -> Finding | None:
    """The first difference of two outputs (got, expected) of one prompt, judged by the larger gap there.

    None when they are equal. Gap 0 on both sides is a tie decided in two ways: a near-tie. A side without a score, or
    an output that merely ends earlier, leaves the gap None and is a failure: nothing explains it.
    """
    got, expected = outputs
    at = judge.first_difference(got, expected)
    if at is None:
        return None
    mine, other = (score[at] if score is not None and at < len(score) else None for score in scores)
    gap = None
    if mine is not None and other is not None and mine.gap is not None and other.gap is not None:
        gap = max(mine.gap, other.gap)
    shown = mine or other
    return Finding(
        severity="fail" if judge.severity(gap, eps) == "fail" else "near-tie",
        method=method,
        prompt=prompt,
        concurrency=concurrency,
        position=at,
        got=got[at] if at < len(got) else None,
        expected=expected[at] if at < len(expected) else None,
        gap=gap,
        top_two_gap=None if shown is None else shown.top_two_gap,
        got_text="" if mine is None else mine.emitted_text[:MAX_TEXT],
        expected_text="" if other is None else other.emitted_text[:MAX_TEXT],
        before=_before(scores[0] or scores[1] or (), at),
    )


def _before(found: Sequence[Position], at: int) -> str:
    return "".join(position.emitted_text for position in found[max(0, at - CONTEXT_TOKENS) : at])[-MAX_TEXT:]
