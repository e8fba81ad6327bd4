"""The best-first tree against plain enumeration, and its figures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.engine.tree import Tree, best_first, chain, shape_of, tree_width


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Each node as its ranks from the root down."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.parent)):
        found.append((*found[tree.parent[node]], tree.rank[node]))
    return found


def score(path: tuple[int, ...], logprobs: list[list[float]]) -> float:
    return math.fsum(logprobs[depth][rank] for depth, rank in enumerate(path))


def all_paths(logprobs: list[list[float]]) -> list[tuple[int, ...]]:
    levels = [range(len(row)) for row in logprobs]
    return [path for depth in range(1, len(levels) + 1) for path in itertools.product(*levels[:depth])]


@st.composite
def drafts(draw: st.DrawFn) -> list[list[float]]:
    depth, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    weights = st.lists(st.floats(0.01, 1.0), min_size=topk, max_size=topk)
    rows = [draw(weights) for _ in range(depth)]
    return [sorted((math.log(w / (sum(row) + 0.1)) for w in row), reverse=True) for row in rows]


@given(drafts(), st.integers(1, 40))
def test_given_any_draft_the_tree_holds_the_most_probable_prefixes(logprobs: list[list[float]], budget: int) -> None:
    tree = best_first(logprobs, budget)
    found = paths(tree)[1:]
    every = sorted((score(path, logprobs) for path in all_paths(logprobs)), reverse=True)
    assert sorted((score(path, logprobs) for path in found), reverse=True) == pytest.approx(every[:budget])
    assert len(set(found)) == len(found) == min(budget, len(every))


@given(drafts(), st.integers(1, 40))
def test_given_any_draft_parents_precede_children_and_depth_counts_edges(
    logprobs: list[list[float]], budget: int
) -> None:
    tree = best_first(logprobs, budget)
    assert (tree.parent[0], tree.depth[0]) == (0, 0)
    for node in range(1, len(tree.parent)):
        assert tree.parent[node] < node
        assert tree.depth[node] == tree.depth[tree.parent[node]] + 1
    assert len(tree.parent) == tree_width(len(logprobs), len(logprobs[0]), budget)


def test_given_a_hand_made_draft_the_order_is_that_of_the_heap() -> None:
    logprobs = [[-0.1, -2.0], [-0.5, -1.0]]
    assert paths(best_first(logprobs, 6))[1:] == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_given_ties_lower_parent_then_lower_rank_comes_first() -> None:
    # Every first-level node scores -1; certain second level adds 0, so children tie with their parents' siblings.
    assert paths(best_first([[-1.0, -1.0, -1.0], [0.0]], 6))[1:] == [(0,), (1,), (2,), (0, 0), (1, 0), (2, 0)]


def test_given_fewer_paths_than_budget_the_tree_is_smaller() -> None:
    assert len(best_first([[-0.1], [-0.1], [-0.1]], 8).parent) == 4
    assert tree_width(3, 1, 8) == 4
    assert tree_width(7, 4, 8) == 9
    assert tree_width(2, 3, 100) == 13


@pytest.mark.parametrize(
    "row", [[float("nan")], [-1.0, float("nan")], [0.5], [-2.0, -1.0], [float("-inf")], [-1.0, float("-inf")], []]
)
def test_given_values_that_are_no_descending_logprobs_it_refuses(row: list[float]) -> None:
    with pytest.raises(ValueError, match="log-probabilities"):
        best_first([row], 3)


def test_chain_is_the_tree_without_branches() -> None:
    assert chain(3) == best_first([[-0.1], [-0.2], [-0.3]], 3)


def test_shape_is_measured_over_the_batch() -> None:
    parent = np.array([[0, 0, 1, 2], [0, 0, 0, 0]])
    depth = np.array([[0, 1, 2, 3], [0, 1, 1, 1]])
    shape = shape_of(parent, depth, np.array([[9, 1, 2, 3], [9, 1, 2, 3]]))
    assert (shape.nodes, shape.max_children, shape.max_depth) == (3, 3, 3)
    twice = shape_of(parent[1:], depth[1:], np.array([[9, 1, 1, 3]]))
    assert (twice.nodes, twice.max_children, twice.max_depth) == (2, 2, 1), "a repeated sibling counts once"
    root = np.zeros((2, 1), dtype=np.int64)
    lone = shape_of(root, root, root)
    assert (lone.nodes, lone.max_children, lone.max_depth) == (0, 0, 0)
