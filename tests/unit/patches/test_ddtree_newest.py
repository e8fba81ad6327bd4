"""overlay ddtree_args of SGLang 0.5.23: what that release has come with and DDTREE does not serve."""

from __future__ import annotations

import pytest

from . import inside_ddtree_arguments
from .marks import newest
from .trees import Tree

pytestmark = newest


def test_unified_memory_is_refused_by_name(patched: Tree) -> None:
    told = patched(inside_ddtree_arguments.resolved, 8, {"enable_unified_memory": True}, {})
    assert told["refused"] == "DDTREE does not support --enable-unified-memory yet."


@pytest.mark.parametrize("pool", ["UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "PageMajorMHATokenToKVPool"])
def test_so_are_pools_whose_slots_are_renamed_or_lie_elsewhere(pool: str, patched: Tree) -> None:
    assert patched(inside_ddtree_arguments.refused_target, {"token_to_kv_pool": pool}) == [f"a KV pool of type {pool}"]
