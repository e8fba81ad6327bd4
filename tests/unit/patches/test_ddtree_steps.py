"""overlay ddtree_worker: whole decode steps, exact against the target's own text, metadata captured and not."""

from __future__ import annotations

import pytest

from . import inside_ddtree_steps
from .trees import Tree

EAGER, CAPTURED = 0, 3
PAIRS = [(4, 6, 3), (4, 3, 1), (6, 2, 2), (4, 12, 4)]
"""(block, budget, topk): a tree, a chain as a tree, a tree narrower than the block, a wide one."""


def setting(block: int, budget: int, topk: int, graphs: int) -> dict[str, int]:
    return {"block": block, "budget": budget, "topk": topk, "graphs": graphs}


@pytest.mark.parametrize("graphs", [EAGER, CAPTURED])
@pytest.mark.parametrize(("block", "budget", "topk"), PAIRS)
def test_the_text_its_kv_and_its_features_are_the_targets(
    block: int, budget: int, topk: int, graphs: int, interpreted: Tree
) -> None:
    told = interpreted(inside_ddtree_steps.decoded, setting(block, budget, topk, graphs), [5, 11], 12)
    assert told["wrong"] is None
    assert max(told["commits"]) > 1
    nodes, children, depth = told["executed"]
    assert nodes == budget and 1 <= children <= topk and depth <= min(block - 1, budget)
