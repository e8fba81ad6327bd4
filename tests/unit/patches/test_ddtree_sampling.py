"""Sampled verify: with seeds, the tree's text is what one draw a token gives; each planted fault shows."""

from __future__ import annotations

from typing import Any

import pytest

from . import inside_ddtree_steps, inside_logprobs
from .marks import NEWEST, every_base
from .test_ddtree_steps import FAULTS, setting
from .trees import BASE, Tree

pytestmark = pytest.mark.slow

ROWS: dict[str, list[dict[str, Any]]] = {
    "filters of two kinds": [
        {"temperature": 1.0, "sampling_seed": 7, "top_k": 5, "top_p": 0.7},
        {"temperature": 0.7, "sampling_seed": 8, "min_p": 0.2},
    ],
    "greedy beside sampled": [{"temperature": 0.0}, {"temperature": 1.3, "sampling_seed": 9}],
    "biased": [
        {"temperature": 1.0, "sampling_seed": 3, "logit_bias": {"4": 2.5}},
        {"temperature": 0.0, "logit_bias": {"5": 3.0}},
    ],
}
SAMPLED_FAULTS = tuple(sorted(path.stem for path in FAULTS.glob("sampled-*.patch")))
TREE = setting(4, 6, 3, 3)


@pytest.mark.parametrize(
    ("base", "rows"), [*((BASE, rows) for rows in ROWS), (NEWEST, "filters of two kinds")], indirect=["base"]
)
def test_the_text_is_what_one_draw_a_token_gives(rows: str, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_steps.decoded, TREE, [5, 11], 16, None, ROWS[rows])
    assert told["wrong"] is None
    assert max(told["commits"]) > 1


@pytest.mark.parametrize("fault", SAMPLED_FAULTS)
def test_each_planted_fault_of_sampling_is_seen(fault: str, interpreted: Tree) -> None:
    patch = str(FAULTS / f"{fault}.patch")
    told = interpreted(inside_ddtree_steps.decoded, TREE, [5, 11], 32, patch, ROWS["filters of two kinds"])
    assert told["wrong"] is not None


@every_base
def test_a_chain_emits_what_is_drawn_without_drafts_as_far_as_they_are_right(interpreted: Tree) -> None:
    """17-dflash-sampled-verify: DFLASH's block is right where it is the draw, under the sampler's own filters."""
    given = [*ROWS["filters of two kinds"], {"temperature": 0.0}, {"temperature": 2.0, "sampling_seed": 4}]
    wanted = interpreted(inside_logprobs.drawn_alone, 3, given)
    for right in range(inside_logprobs.BLOCK):
        drafts = [[token if i < right else (token + 1) % 11 for i, token in enumerate(row[:-1])] for row in wanted]
        told = interpreted(inside_logprobs.verified, 3, drafts, given, [0] * len(given), [None] * len(given))
        assert [request["tokens"] for request in told] == [row[: right + 1] for row in wanted]


def test_a_request_with_budget_0_commits_a_token_a_step_and_its_neighbour_goes_on(interpreted: Tree) -> None:
    rows = [{"temperature": 1.0, "sampling_seed": 3, "custom_params": {"ddtree_budget": 0}}, {"temperature": 0.0}]
    told = interpreted(inside_ddtree_steps.decoded, TREE, [5, 11], 8, None, rows)
    assert told["wrong"] is None
    assert set(told["commits"][::2]) == {1} and max(told["commits"][1::2]) > 1
