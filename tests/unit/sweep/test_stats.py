"""Given data whose truth is known, the intervals hold it as often as they say."""

from __future__ import annotations

import math
import random

import pytest

from ddtree_ops.sweep.stats import median_interval, paired_ratio, student_quantile


@pytest.mark.parametrize(
    ("share", "freedom", "known"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 10, 2.22814), (0.95, 5, 2.01505), (0.975, 1e6, 1.95996)],
)
def test_students_quantiles_are_the_tables(share: float, freedom: float, known: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(known, rel=1e-4)


def test_a_median_of_three_says_that_it_is_sure_to_three_quarters() -> None:
    assert median_interval([3, 1, 2]) == (2, 1, 3, 0.75)


def test_a_median_of_ten_drops_the_extremes() -> None:
    found = median_interval(range(1, 11))
    assert (found.value, found.low, found.high) == (5.5, 2, 9)
    assert found.coverage == pytest.approx(1 - 2 * 11 / 1024)


def test_median_intervals_cover_as_often_as_they_say() -> None:
    chance = random.Random(1)
    found = [median_interval([chance.gauss(7, 2) for _ in range(6)]) for _ in range(2000)]
    held = sum(one.low <= 7 <= one.high for one in found) / 2000
    assert held == pytest.approx(found[0].coverage, abs=0.015)


def measured(
    chance: random.Random, speed: float, starts: int, sigma: float, hard: list[float]
) -> dict[str, dict[int, float]]:
    """Speeds of ``starts`` starts that differ by ``sigma``, over prompts as hard as ``hard`` says."""
    found = {}
    for start in range(starts):
        shift = chance.gauss(0, sigma)
        found[f"{start}"] = {p: speed * math.exp(h + shift + chance.gauss(0, 0.02)) for p, h in enumerate(hard)}
    return found


@pytest.mark.parametrize("starts", [2, 3, 5])
@pytest.mark.parametrize("truth", [1.0, 1.1])
def test_the_paired_ratio_is_within_its_interval_nineteen_times_of_twenty(starts: int, truth: float) -> None:
    chance = random.Random(starts)
    held = false = 0
    for _ in range(400):
        hard = [chance.gauss(0, 0.5) for _ in range(32)]
        ratio = paired_ratio(measured(chance, truth, starts, 0.02, hard), measured(chance, 1.0, starts, 0.02, hard))
        held += ratio.low <= truth <= ratio.high
        false += ratio.beats or ratio.loses
    assert held / 400 >= 0.925
    if truth == 1.0:
        assert false / 400 <= 0.075


def test_prompts_differ_widely_and_a_small_difference_is_still_seen() -> None:
    chance = random.Random(3)
    hard = [chance.gauss(0, 1) for _ in range(64)]
    ratio = paired_ratio(measured(chance, 1.1, 3, 0.005, hard), measured(chance, 1.0, 3, 0.005, hard))
    assert ratio.beats and ratio.value == pytest.approx(1.1, rel=0.02)


def test_many_prompts_of_one_start_prove_nothing() -> None:
    chance = random.Random(4)
    hard = [0.0] * 500
    ratio = paired_ratio(measured(chance, 2.0, 1, 0, hard), measured(chance, 1.0, 2, 0, hard))
    assert ratio.value == pytest.approx(2, rel=0.01) and not ratio.proven and not ratio.beats


def test_starts_that_differ_as_much_as_the_configurations_prove_nothing() -> None:
    a = {"1": dict.fromkeys(range(50), 1.0), "2": dict.fromkeys(range(50), 1.2)}
    b = {"3": dict.fromkeys(range(50), 0.9), "4": dict.fromkeys(range(50), 1.1)}
    ratio = paired_ratio(a, b)
    assert ratio.proven and ratio.low < 1 < ratio.high


def test_without_a_prompt_in_common_there_is_no_pair() -> None:
    with pytest.raises(ValueError, match="in common"):
        paired_ratio({"1": {1: 1.0}}, {"2": {2: 1.0}})
