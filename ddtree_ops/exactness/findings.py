"""From judged positions to findings with the evidence a person needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.exactness import judge
from ddtree_ops.exactness.judge import Position
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.verdict import Finding, Severity

CONTEXT_TOKENS = 12
MAX_TEXT = 200


def of_positions(method: str, prompt: str, load: Load, found: Sequence[Position], eps: float) -> list[Finding]:
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
                    concurrency=load.concurrency,
                    mixed=load.mixed,
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
    load: Load,
    outputs: tuple[Sequence[int], Sequence[int]],
    scores: tuple[Sequence[Position] | None, Sequence[Position] | None],
    eps: float,
    unscored: Severity = "fail",
) -> Finding | None:
    """The first difference of two outputs (got, expected) of one prompt, judged by the larger gap there.

    None when they are equal. Gap 0 on both sides is a tie decided in two ways: a near-tie. An output that merely ends
    earlier leaves the gap None and is a failure: nothing explains it. Where neither side has a score the gap is None
    too and the severity is ``unscored``.
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
    severity: Severity = "fail" if judge.severity(gap, eps) == "fail" else "near-tie"
    if scores == (None, None) and at < min(len(got), len(expected)):
        severity = unscored
    return Finding(
        severity=severity,
        method=method,
        prompt=prompt,
        concurrency=load.concurrency,
        mixed=load.mixed,
        position=at,
        got=got[at] if at < len(got) else None,
        expected=expected[at] if at < len(expected) else None,
        gap=gap,
        top_two_gap=None if shown is None else shown.top_two_gap,
        got_text="" if mine is None else mine.emitted_text[:MAX_TEXT],
        expected_text="" if other is None else other.emitted_text[:MAX_TEXT],
        before=_before(scores[0] or scores[1] or (), at),
    )


def of_token(
    method: str,
    prompt: str,
    load: Load,
    token: tuple[int, int, int],
    found: Sequence[Position] | None,
    eps: float,
    unscored: Severity,
) -> Finding:
    """``token``: (got, expected, position) where another pass over the same beginning chose another token.

    ``found``: the output's scores; the token that they rank first has gap 0, any other at least the top-two gap, and
    the larger gap of the two tokens judges. Without scores the severity is ``unscored``.
    """
    got, expected, at = token
    position = found[at] if found is not None and at < len(found) else None
    gap = None
    if position is not None and position.gap is not None:
        other = 0.0 if expected == position.best else position.top_two_gap
        gap = None if other is None else max(position.gap, other)
    return Finding(
        severity=unscored if found is None else "fail" if judge.severity(gap, eps) == "fail" else "near-tie",
        method=method,
        prompt=prompt,
        concurrency=load.concurrency,
        mixed=load.mixed,
        position=at,
        got=got,
        expected=expected,
        gap=gap,
        top_two_gap=None if position is None else position.top_two_gap,
        got_text="" if position is None else position.emitted_text[:MAX_TEXT],
        expected_text=position.best_text[:MAX_TEXT] if position is not None and expected == position.best else "",
        before=_before(found or (), at),
    )


def of_logprobs(
    method: str,
    prompt: str,
    load: Load,
    token: int,
    position: Position,
    verified: float | None,
    found: Sequence[Position],
) -> Finding:
    """A token to which verify and prefill give logprobs that rounding does not explain; ``gap`` is their distance."""
    apart = None if verified is None or position.logprob is None else abs(verified - position.logprob)
    return Finding(
        severity="fail",
        method=method,
        prompt=prompt,
        concurrency=load.concurrency,
        mixed=load.mixed,
        position=position.index,
        got=token,
        expected=position.best,
        gap=apart,
        top_two_gap=position.top_two_gap,
        got_text=position.emitted_text[:MAX_TEXT],
        expected_text=position.best_text[:MAX_TEXT],
        before=_before(found, position.index),
    )


def _before(found: Sequence[Position], at: int) -> str:
    return "".join(position.emitted_text for position in found[max(0, at - CONTEXT_TOKENS) : at])[-MAX_TEXT:]
