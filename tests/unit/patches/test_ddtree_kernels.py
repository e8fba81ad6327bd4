"""overlay ddtree_mask, ddtree_verify: mask, walk and commit, as Triton computes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.longer import longer

from . import inside_ddtree_kernels
from .marks import NEWEST
from .trees import BASE, RaisedThereError, Tree


@pytest.mark.parametrize("width", [2, 8, 9, 17, 65])
def test_the_mask_is_the_trees_and_nothing_else_is_written(width: int, interpreted: Tree) -> None:
    assert interpreted(inside_ddtree_kernels.mask_faults, 3, width, [5]) == []
    assert interpreted(inside_ddtree_kernels.mask_faults, 4, width, [1, 12, 3]) == []


@pytest.mark.parametrize(("base", "width"), [(BASE, 2), (BASE, 8), longer(BASE, 33), (NEWEST, 8)], indirect=["base"])
def test_the_walk_is_the_reference_engines(width: int, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_kernels.walks_unlike_the_reference, 11, width, 8)
    assert told["wrong"] is None
    assert told["longest"] >= min(4, width)


@pytest.mark.parametrize("latent", [False, True])
def test_the_accepted_paths_kv_comes_to_the_front(latent: bool, interpreted: Tree) -> None:
    # 2 -> 1 frees what 3 -> 2 fills; a chain moves nothing; a path of the root alone neither
    paths = [[0, 2, 3, 9], [0, 1, 2], [0], [0, 4, 5, 6, 7, 8, 9, 10]]
    assert interpreted(inside_ddtree_kernels.moved, paths, 12, latent) == []


def test_rows_that_are_no_rows_are_refused(interpreted: Tree) -> None:
    with pytest.raises(RaisedThereError, match="DDTREE moves whole rows of KV"):
        interpreted(inside_ddtree_kernels.refused_buffer)


SPLIT: list[tuple[Any, ...]] = [
    # width, prefixes, heads, KV heads, head size, shares, more
    (9, [7, 300], 2, 1, 16, 3, {}),
    # no prefix at all, and one of which the last shares are empty
    (17, [0, 260], 4, 1, 16, 4, {}),
    # rows beyond one tile, a head size that is no power of two
    (65, [140], 4, 2, 24, 2, {}),
    # more shares than keys; capped scores
    (4, [400, 1], 2, 2, 16, 16, {"cap": 3.0}),
    # a draft's block, whose tokens all see each other
    (8, [33, 270], 4, 2, 16, 2, {"masked": False}),
    # one program for the prefix and the nodes
    (17, [90, 0, 3], 8, 2, 16, 1, {"cap": 3.0}),
    (8, [33, 70], 4, 2, 16, 1, {"masked": False}),
]


@pytest.mark.parametrize("case", SPLIT)
def test_attention_with_the_prefix_split_is_dense_attention(case: tuple[Any, ...], interpreted: Tree) -> None:
    assert interpreted(inside_ddtree_kernels.split_apart, 1, *case) < 2e-6


def test_in_16_bits_it_is_as_near_as_they_are(interpreted: Tree) -> None:
    assert interpreted(inside_ddtree_kernels.split_apart, 6, 9, [450], 8, 2, 32, 3, {"half": True}) < 2e-3


@pytest.mark.parametrize("width", [9, 64, 65])
def test_attention_under_the_mask_is_the_trees(width: int, interpreted: Tree) -> None:
    """64 nodes fill one tile of the kernel, 65 take two; the second request has another prefix."""
    told = interpreted(inside_ddtree_kernels.attention_apart, 6, width, [7, 70])
    assert told["apart"] < 1e-5
    assert told["as_chain"] > 0.1
