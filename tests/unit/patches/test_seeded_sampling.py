"""Patch 16: a seed fixes a request's draws, whoever shares its batch; a row without one is drawn anew each time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from . import inside_sampling
from .marks import NEWEST, every_base
from .toy import VOCABULARY
from .trees import BASE, Tree

FLAT = [0.0] * VOCABULARY
SLOPE = [0.1 * i for i in range(VOCABULARY)]
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 9},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.1},
]


def seeded(seed: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "sampling_seed": seed, **more}


@pytest.mark.parametrize(
    ("base", "filters"), [*((BASE, filters) for filters in FILTERS), (NEWEST, FILTERS[-1])], indirect=["base"]
)
def test_a_seed_and_a_position_fix_the_draw_in_any_batch(filters: dict[str, Any], interpreted: Tree) -> None:
    one = seeded(5, **filters)
    alone = [interpreted(inside_sampling.drawn, [one], [SLOPE], [position])[0] for position in range(12)]
    assert len(set(alone)) > 2
    for others in ([seeded(6)], [{"temperature": 0.0}], [seeded(7, top_k=3, min_p=0.2)], [{"temperature": 0.8}]):
        beside = [
            interpreted(inside_sampling.drawn, [*others, one], [FLAT, SLOPE], [3, position])[1]
            for position in range(12)
        ]
        assert beside == alone


@every_base
def test_a_row_without_a_seed_is_drawn_anew_beside_one_with(interpreted: Tree) -> None:
    rows = [seeded(5), {"temperature": 1.0}]
    made = [interpreted(inside_sampling.drawn, rows, [FLAT, FLAT], [3, 3]) for _ in range(12)]
    fixed, free = (Counter(column) for column in zip(*made, strict=True))
    assert len(fixed) == 1 and len(free) > 3


def test_seeded_draws_have_the_filtered_law(interpreted: Tree) -> None:
    """400 seeds: within four standard deviations of top-k 4 of a slope, and nothing outside it."""
    count = 400
    rows = [seeded(seed, top_k=4) for seed in range(count)]
    drawn = Counter(interpreted(inside_sampling.drawn, rows, [SLOPE] * count, [0] * count))
    weights = {VOCABULARY - 1 - rank: 2.718281828 ** (-0.1 * rank) for rank in range(4)}
    assert set(drawn) == set(weights)
    for token, weight in weights.items():
        p = weight / sum(weights.values())
        assert abs(drawn[token] - count * p) < 4 * (count * p * (1 - p)) ** 0.5


@every_base
def test_a_greedy_row_takes_the_first_of_equals_in_any_batch(interpreted: Tree) -> None:
    tied = [1.0 if i in (4, 11, 17) else 0.0 for i in range(VOCABULARY)]
    greedy = {"temperature": 0.0}
    assert interpreted(inside_sampling.drawn, [greedy], [tied], [0]) == [4]
    assert interpreted(inside_sampling.drawn, [seeded(1), greedy], [FLAT, tied], [0, 0])[1] == 4


@every_base
@pytest.mark.parametrize("law", [[0.5, 0.5, 0.0], [0.6, 0.4 - 1e-12, 1e-12]])
def test_no_hash_draws_what_is_all_but_impossible(law: list[float], interpreted: Tree) -> None:
    assert interpreted(inside_sampling.unluckiest, law) != 2


@every_base
def test_joined_and_filtered_batches_keep_each_rows_seed(interpreted: Tree) -> None:
    none = -(1 << 63)
    free = {"temperature": 1.0}
    told = interpreted(inside_sampling.drawn_after, [free, seeded(4)], [free], [1, 2])
    assert told == {"joined": [none, 4, none], "kept": [4, none]}
    told = interpreted(inside_sampling.drawn_after, [free], [free, seeded(9)], [2])
    assert told == {"joined": [none, none, 9], "kept": [9]}
    assert interpreted(inside_sampling.drawn_after, [free], [free], [0]) == {"joined": None, "kept": None}


@every_base
def test_eagles_batches_have_no_seeds_as_before(interpreted: Tree) -> None:
    """Its verify takes its coins from any seed it finds, that of a row without one too."""
    assert interpreted(inside_sampling.seeds_under, "EAGLE", [seeded(4)]) is None
    for algorithm in ("NONE", "DFLASH", "DDTREE"):
        assert interpreted(inside_sampling.seeds_under, algorithm, [seeded(4)]) == [4]


@pytest.mark.parametrize("seed", [1 << 63, -(1 << 63), 1.5, "7", True])
def test_a_seed_that_no_64_bits_hold_is_refused_by_name(seed: Any, interpreted: Tree) -> None:
    assert "sampling_seed must be a 64-bit integer" in interpreted(inside_sampling.refusal, seeded(seed))
    assert interpreted(inside_sampling.refusal, seeded((1 << 63) - 1)) is None
