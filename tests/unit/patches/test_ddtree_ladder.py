"""overlay ddtree_ladder, 19-ddtree-ladder: a budget by batch size, and the text it leaves as it is."""

from __future__ import annotations

from typing import Any

import pytest

from . import inside_ddtree_ladder, inside_ddtree_steps
from .marks import NEWEST
from .trees import BASE, Tree

SIZES = [1, 2, 4, 8, 16, 32, 64]


def setting(graphs: int, ladder: str) -> dict[str, Any]:
    return {"block": 4, "budget": 6, "topk": 3, "graphs": graphs, "ladder": ladder}


def test_rungs_go_down_as_batches_grow(patched: Tree) -> None:
    assert patched(inside_ddtree_ladder.rungs, None, 16) == [[1, 16]]
    assert patched(inside_ddtree_ladder.rungs, "8:8,32:0", 16) == [[1, 16], [8, 8], [32, 0]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not REQUESTS:BUDGET"),
        ("8", "'8' is not REQUESTS:BUDGET"),
        ("8:8,", "'' is not REQUESTS:BUDGET"),
        ("8:-1", "'8:-1' is not REQUESTS:BUDGET"),
        ("1:8", "1 does not exceed 1"),
        ("8:8,8:4", "8 does not exceed 8"),
        ("8:16", "from 8 requests on the budget must be below 16, not 16"),
        ("8:4,16:8", "from 16 requests on the budget must be below 4, not 8"),
    ],
)
def test_other_words_are_refused(text: str, said: str, patched: Tree) -> None:
    told = patched(inside_ddtree_ladder.rungs, text, 16)
    assert told.startswith(f"DDTREE: --speculative-ddtree-ladder {text}: ") and said in told


def test_each_rung_has_the_graphs_that_its_batches_are_padded_to(patched: Tree) -> None:
    assert patched(inside_ddtree_ladder.sizes, "8:8,32:0", SIZES) == [[1, 2, 4, 8], [8, 16, 32], [32, 64]]
    assert patched(inside_ddtree_ladder.sizes, "3:2", SIZES) == [[1, 2], [4, 8, 16, 32, 64]]
    # more requests than any graph holds run without one
    assert patched(inside_ddtree_ladder.sizes, "100:2", SIZES) == [SIZES, []]


@pytest.mark.parametrize(("base", "graphs"), [(BASE, 0), (BASE, 3), (NEWEST, 3)], indirect=["base"])
def test_the_text_its_kv_and_its_features_are_the_targets_whatever_the_budget(graphs: int, interpreted: Tree) -> None:
    """Requests meet trees of six, four and no nodes as others join and leave; each step's KV is looked at."""
    turns = [[0, 1, 2], [0, 1], [2], [0, 2, 1], [1, 2], [0], [0, 1, 2]]
    told = interpreted(
        *(inside_ddtree_steps.decoded, setting(graphs, "2:4,3:0"), [5, 11, 3], 12, None, None, False, turns)
    )
    assert told["wrong"] is None
    assert told["nodes"] == [0, 4, 6, 0, 4, 6, 0]
    assert max(told["commits"]) > 1 and told["commits"][:3] == [1, 1, 1]
