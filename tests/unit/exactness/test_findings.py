"""A finding carries what a person needs to judge it: the tokens, both gaps, the words before."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.exactness import findings
from ddtree_ops.exactness.findings import CONTEXT_TOKENS
from ddtree_ops.exactness.judge import Position
from ddtree_ops.exactness.plan import Load
from ddtree_ops.exactness.render import _first
from ddtree_ops.exactness.verdict import Finding, Severity

LOAD = Load(8, True)
EPS = 0.01


def position(index: int, emitted: int, best: int, gap: float | None, two: float | None = 0.5) -> Position:
    return Position(index, emitted, f"<{emitted}>", best, f"<{best}>", gap, two)


def scores(*emitted: int, gap: float = 0.0, best: int = 9) -> list[Position]:
    """An output of which only the last token is not the target's choice where ``gap`` is not 0."""
    last = len(emitted) - 1
    return [
        position(i, token, best if gap and i == last else token, gap if i == last else 0.0)
        for i, token in enumerate(emitted)
    ]


def of_difference(got: list[int], expected: list[int], *sides: list[Position] | None, **more: Any) -> Finding:
    found = findings.of_difference("concurrency", "p", LOAD, (got, expected), (sides[0], sides[1]), EPS, **more)
    assert found is not None
    return found


@pytest.mark.parametrize(("gaps", "severity"), [((0.004, 0.002), "near-tie"), ((0.002, 0.2), "fail")])
def test_a_difference_is_judged_by_the_larger_gap(gaps: tuple[float, float], severity: Severity) -> None:
    mine, other = scores(1, 2, 3, gap=gaps[0]), scores(1, 2, 4, gap=gaps[1])
    assert of_difference([1, 2, 3], [1, 2, 4], mine, other) == Finding(
        severity=severity,
        method="concurrency",
        prompt="p",
        concurrency=8,
        mixed=True,
        position=2,
        got=3,
        expected=4,
        gap=max(gaps),
        top_two_gap=0.5,
        got_text="<3>",
        expected_text="<4>",
        before="<1><2>",
    )


def test_outputs_that_are_equal_are_no_finding() -> None:
    assert findings.of_difference("concurrency", "p", LOAD, ([1, 2], [1, 2]), (None, None), EPS) is None


def test_an_output_that_ends_earlier_is_a_failure_that_no_gap_explains() -> None:
    found = of_difference([1, 2], [1, 2, 3], scores(1, 2), scores(1, 2, 3))
    assert (found.severity, found.got, found.expected, found.gap, found.position) == ("fail", None, 3, None, 2)
    assert (found.got_text, found.expected_text) == ("", "<3>")


@pytest.mark.parametrize("unscored", ["fail", "near-tie"])
def test_without_scores_a_difference_is_what_the_caller_says(unscored: Severity) -> None:
    found = of_difference([1, 3], [1, 4], None, None, unscored=unscored)
    assert (found.severity, found.gap, found.top_two_gap, found.before) == (unscored, None, None, "")
    shorter = of_difference([1], [1, 4], None, None, unscored=unscored)
    assert shorter.severity == "fail", "an end is no matter of rounding"


def test_the_words_before_are_the_last_few() -> None:
    long = list(range(100, 130))
    found = of_difference([*long, 3], [*long, 4], scores(*long, 3, gap=1.0), None)
    assert found.before == "".join(f"<{token}>" for token in long[-CONTEXT_TOKENS:])


@pytest.mark.parametrize(
    ("expected", "gap", "severity", "text"),
    [(9, 0.004, "near-tie", "<9>"), (9, 0.2, "fail", "<9>"), (7, 0.004, "fail", "")],
)
def test_another_passs_token_is_judged_by_the_outputs_scores(
    expected: int, gap: float, severity: str, text: str
) -> None:
    """The one ranked first has gap 0; of any other token only the top-two gap is known."""
    found = findings.of_token("golden", "p", LOAD, (3, expected, 1), scores(1, 3, gap=gap), EPS, "fail")
    assert (found.severity, found.got, found.expected, found.expected_text) == (severity, 3, expected, text)
    assert found.gap == (gap if expected == 9 else 0.5)
    assert (found.position, found.got_text, found.top_two_gap, found.before) == (1, "<3>", 0.5, "<1>")


def test_a_logprob_that_rounding_does_not_explain_tells_how_far_apart() -> None:
    there = Position(1, 3, "<3>", 9, "<9>", 0.1, 0.5, -1.25)
    found = findings.of_logprobs("logprob", "p", LOAD, 3, there, -1.75, [position(0, 1, 1, 0.0), there])
    assert (found.severity, found.gap, found.got, found.expected) == ("fail", 0.5, 3, 9)
    assert (found.position, found.top_two_gap, found.before) == (1, 0.5, "<1>")
    assert findings.of_logprobs("logprob", "p", LOAD, 3, there, None, []).gap is None


def test_the_first_finding_is_told_with_its_words() -> None:
    found = of_difference([1, 2, 3], [1, 2, 4], scores(1, 2, 3, gap=0.2), scores(1, 2, 4))
    assert list(_first(found)) == [
        "  first: fail (concurrency): p at C=8 mixed, position 2: token 3 instead of 4, gap 0.2, top-two gap 0.5",
        "    after     …'<1><2>'",
        "    got       '<3>'",
        "    expected  '<4>'",
    ]
    bare = of_difference([1], [1, 4], None, None)
    assert list(_first(bare)) == [
        "  first: fail (concurrency): p at C=8 mixed, position 1: end instead of 4, gap unknown"
    ]
