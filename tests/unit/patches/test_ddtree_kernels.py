"""overlay ddtree_mask, ddtree_verify: mask, walk and commit, as Triton computes them."""

from __future__ import annotations

import pytest

from . import inside_ddtree_kernels
from .trees import RaisedThereError, Tree


@pytest.mark.parametrize("width", [2, 8, 9, 17, 65])
def test_the_mask_is_the_trees_and_nothing_else_is_written(width: int, interpreted: Tree) -> None:
    assert interpreted(inside_ddtree_kernels.mask_faults, 3, width, [5]) == []
    assert interpreted(inside_ddtree_kernels.mask_faults, 4, width, [1, 12, 3]) == []


@pytest.mark.parametrize("width", [2, 8, 33])
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


@pytest.mark.parametrize("width", [9, 64, 65])
def test_attention_under_the_mask_is_the_trees(width: int, interpreted: Tree) -> None:
    """64 nodes fill one tile of the kernel, 65 take two; the second request has another prefix."""
    told = interpreted(inside_ddtree_kernels.attention_apart, 6, width, [7, 70])
    assert told["apart"] < 1e-5
    assert told["as_chain"] > 0.1
