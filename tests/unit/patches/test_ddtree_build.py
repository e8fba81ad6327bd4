"""overlay ddtree_build, ddtree_sampler: the trees are the reference engine's, node for node."""

from __future__ import annotations

import pytest

from tests.longer import longer

from . import inside_ddtree_build
from .trees import Tree

ARRAYS = ("parents", "depths", "ranks", "next_token", "next_sibling", "tokens")


@pytest.mark.parametrize("trees", [1_000, longer(10_000)])
def test_trees_are_the_heaps_node_for_node(trees: int, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_build.unlike_the_heap, 7, trees)
    assert told["wrong"] is None
    assert told["cases"] == trees
    assert told["kinds"] == sorted(inside_ddtree_build.KINDS)


@pytest.mark.parametrize(
    ("block", "topk", "budget", "there"), [(8, 1, 7, 7), (8, 1, 8, 7), (8, 2, 300, 254), (2, 4, 9, 4), (8, 4, 65, 65)]
)
def test_how_many_nodes_there_are(block: int, topk: int, budget: int, there: int, interpreted: Tree) -> None:
    assert interpreted(inside_ddtree_build.nodes_there, block, topk, budget) == there


def test_a_failing_drafter_still_gives_trees(interpreted: Tree) -> None:
    for parents in interpreted(inside_ddtree_build.broken_logprobs).values():
        (tree,) = parents
        assert tree[0] == 0 and all(parent < node for node, parent in enumerate(tree) if node)


@pytest.mark.parametrize("kind", ["plain", "ties", "gaps"])
@pytest.mark.parametrize(("vocab", "topk"), [(40, 1), (3, 4), (4096, 8), (9001, 4)])
def test_the_best_candidates_are_a_stable_sorts(vocab: int, topk: int, kind: str, interpreted: Tree) -> None:
    """In one chunk, in a whole one, in three; fewer tokens than candidates."""
    assert interpreted(inside_ddtree_build.candidates_unlike_a_sort, 3, vocab, topk, kind) is None


@pytest.mark.parametrize("shards", [2, longer(4), longer(8)])
def test_candidates_are_the_heads_own_on_every_rank(shards: int, interpreted: Tree) -> None:
    """Of eight, each has three rows and four candidates are kept."""
    for seed in range(2):  # the interpreter of Triton takes seconds for each rank
        told = interpreted(inside_ddtree_build.sampled, seed, shards, False)
        whole = dict(zip(ARRAYS, told["whole"], strict=True))
        assert whole["parents"] == told["oracle"]["parents"]
        assert whole["tokens"] == told["oracle"]["tokens"]
        assert all(rank == told["whole"] for rank in told["ranks"])
        assert [row[0] for row in whole["tokens"]] == told["roots"]


def test_equal_logits_give_every_rank_the_same_tree(interpreted: Tree) -> None:
    for seed in range(2):
        first, *others = interpreted(inside_ddtree_build.sampled, seed, 4, True)["ranks"]
        assert all(rank == first for rank in others)
