"""13-ddtree-slots: a step's slots are reserved, and a row of req_to_token has room for them at the context limit."""

from __future__ import annotations

import pytest

from . import inside_ddtree_figures
from .inside_ddtree_figures import CONTEXT
from .inside_ddtree_graphs import tree
from .marks import every_base
from .trees import Tree

pytestmark = every_base


@pytest.mark.parametrize(("budget", "slots"), [(3, 8), (7, 8), (16, 17), (64, 65)])
def test_a_step_takes_the_tree_and_no_less_than_the_block(budget: int, slots: int, patched: Tree) -> None:
    told = patched(inside_ddtree_figures.reserved, tree(budget), CONTEXT - 1)
    assert told["end"] == CONTEXT - 1 + 2 * slots
    assert told["admitted"] == 2 * slots
    assert told["row"] >= told["end"] + 4 - 1


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("committed", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 17])
def test_with_pages_whole_ones_are_reserved_and_the_row_has_them(page_size: int, committed: int, patched: Tree) -> None:
    told = patched(inside_ddtree_figures.reserved, {**tree(16), "page_size": page_size}, committed)
    assert told["end"] % page_size == 0 and 0 <= told["end"] - (committed + 34) < page_size
    assert told["row"] >= told["end"] + 4 - 1


def test_stock_reserves_beyond_its_row(stock: Tree, patched: Tree) -> None:
    """And DFLASH itself is left as it is."""
    chain = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 17}
    told = stock(inside_ddtree_figures.reserved, chain, CONTEXT - 1)
    assert told["end"] > told["row"]
    assert patched(inside_ddtree_figures.reserved, chain, CONTEXT - 1) == told
