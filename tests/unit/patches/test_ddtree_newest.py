"""overlay ddtree_args of SGLang 0.5.23: what that release has come with and DDTREE does not serve."""

from __future__ import annotations

from typing import Any

import pytest

from . import inside_ddtree_arguments
from .marks import newest
from .trees import Tree

pytestmark = newest

REFUSED: dict[str, dict[str, Any]] = {
    "--attn-cp-size 2": {"attn_cp_size": 2},
    "--enable-return-indexer-topk": {"enable_return_indexer_topk": True},
    "--enable-return-routed-experts": {"enable_return_routed_experts": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_came_with_it_is_refused_by_name(words: str, patched: Tree) -> None:
    told = patched(inside_ddtree_arguments.resolved, 8, REFUSED[words], {})
    assert told["refused"] == f"DDTREE does not support {words} yet."


@pytest.mark.parametrize("pool", ["UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "PageMajorMHATokenToKVPool"])
def test_so_are_pools_whose_slots_are_renamed_or_lie_elsewhere(pool: str, patched: Tree) -> None:
    assert patched(inside_ddtree_arguments.refused_target, {"token_to_kv_pool": pool}) == [f"a KV pool of type {pool}"]
