"""15-ddtree-figures: accept rate by depth, and what a step executed, as the exactness gate reads it."""

from __future__ import annotations

import pytest

from ddtree_ops.exactness.structure import Executed, executed, told

from . import inside_ddtree_figures
from .inside_ddtree_graphs import CHAIN, tree
from .marks import every_base
from .trees import Tree

pytestmark = pytest.mark.slow


def test_the_figures_are_the_reference_engines(interpreted: Tree) -> None:
    for ours, theirs in interpreted(inside_ddtree_figures.shapes, 3, 40):
        assert ours == theirs


def test_links_in_a_circle_end(patched: Tree) -> None:
    assert patched(inside_ddtree_figures.endless) == [2, 1, 2]


@every_base
@pytest.mark.parametrize(("budget", "longest"), [(16, 7), (64, 7), (3, 3)])
def test_the_accept_rate_divides_by_the_depth(budget: int, longest: int, patched: Tree) -> None:
    meta = patched(inside_ddtree_figures.accept_rate, tree(budget), 12, 10)
    assert meta["spec_num_proposed_drafts"] == 10 * longest
    assert meta["spec_accept_rate"] == pytest.approx(12 / (10 * longest))
    assert meta["spec_accept_length"] == pytest.approx(2.3)


@every_base
def test_a_chains_accept_rate_is_as_released(patched: Tree, stock: Tree) -> None:
    wanted = stock(inside_ddtree_figures.accept_rate, CHAIN, 12, 10)
    assert patched(inside_ddtree_figures.accept_rate, CHAIN, 12, 10) == wanted
    assert wanted["spec_num_proposed_drafts"] == 70


@every_base
def test_server_info_shows_what_the_gate_reads(patched: Tree) -> None:
    state = patched(inside_ddtree_figures.internal_state, [16, 4, 7])
    info: dict[str, object] = {"internal_states": [{"executed": state}]}
    assert executed(info) == Executed(nodes=16, max_children=4, max_depth=7)
    before: dict[str, object] = {"internal_states": [{"executed": patched(inside_ddtree_figures.internal_state, None)}]}
    assert told(before) and executed(before) is None
