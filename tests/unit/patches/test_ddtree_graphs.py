"""11-ddtree-graphs, 12-ddtree-triton: graphs read the mask that is written, and nothing is larger than it need be."""

from __future__ import annotations

from typing import Any

import pytest

from . import inside_ddtree_graphs
from .inside_ddtree_graphs import CHAIN, tree
from .marks import every_base
from .trees import Tree

pytestmark = every_base


def test_the_verify_is_captured_with_the_masks_own_buffer(patched: Tree) -> None:
    told = patched(inside_ddtree_graphs.captured, "DDTREE", False, 17)
    assert told == {"kind": "DDTreeVerifyInput", "width": 17, "mask": True, "hidden": "FULL"}
    draft = patched(inside_ddtree_graphs.captured, "DDTREE", True, 8)
    assert draft == {"kind": "DFlashVerifyInput", "width": 8, "mask": None, "hidden": "NULL"}


def test_a_chains_verify_is_captured_without_a_mask_as_released(patched: Tree, stock: Tree) -> None:
    wanted = {"kind": "DFlashVerifyInput", "width": 8, "mask": None, "hidden": "FULL"}
    assert patched(inside_ddtree_graphs.captured, "DFLASH", False, 8) == wanted
    assert stock(inside_ddtree_graphs.captured, "DFLASH", False, 8) == wanted


def test_another_width_raises_for_a_tree_and_runs_eagerly_for_a_chain(patched: Tree) -> None:
    said = patched(inside_ddtree_graphs.other_width, "DDTREE")
    assert said == "DDTREE: a batch of 9 tokens a request meets CUDA graphs of 17."
    assert patched(inside_ddtree_graphs.other_width, "DFLASH") is False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"target": None, "draft": None}, None),
        ({"target": 8}, "the target's graphs are 8 tokens a request wide, not 17"),
        ({"draft": 17}, "the draft's graphs are 17 tokens a request wide, not 8"),
        ({"draft": None}, "the target has CUDA graphs and the draft has none"),
    ],
)
def test_after_capture_the_worker_looks(change: dict[str, Any], words: str | None, patched: Tree) -> None:
    said = patched(inside_ddtree_graphs.unfit_graphs, change)
    assert said is None if words is None else words in said


def test_a_graph_that_would_not_read_the_mask_is_not_captured(patched: Tree) -> None:
    assert patched(inside_ddtree_graphs.captured_mask, "the buffer") is None
    assert "without a tree mask" in patched(inside_ddtree_graphs.captured_mask, "none")
    assert "another buffer" in patched(inside_ddtree_graphs.captured_mask, "a copy")


def test_a_request_with_a_penalty_stops_the_verify_unless_it_was_refused(patched: Tree) -> None:
    """Under overlap a refused request's first step is launched before its prefill's result ends it: seen on an H200,
    where the first refusal ended the server."""
    said = patched(inside_ddtree_graphs.penalised_in_a_batch, "served")
    assert said == "DDTREE: a request with penalties reached the verify"
    assert patched(inside_ddtree_graphs.penalised_in_a_batch, "refused") is None
    assert patched(inside_ddtree_graphs.penalised_in_a_batch, "finished") is None


@pytest.mark.parametrize("raises", [False, True])
def test_sglangs_watch_over_slots_says_nothing_of_the_start_up_canary(raises: bool, patched: Tree) -> None:
    told = patched(inside_ddtree_graphs.watched, raises)
    assert told == {"during": 0, "after": 1, "found": 0, "ring": 0}


def test_no_step_is_silently_eager(patched: Tree) -> None:
    said = patched(inside_ddtree_graphs.ran_eagerly, 8, 5)
    assert said == "DDTREE: the verify of 5 requests ran without a CUDA graph, though graphs reach to 8"
    # more requests than were captured, and a server without graphs
    assert patched(inside_ddtree_graphs.ran_eagerly, 8, 9) is None
    assert patched(inside_ddtree_graphs.ran_eagerly, None, 1) is None


def test_buffers_go_by_requests_and_reach_beyond_the_context(patched: Tree, stock: Tree) -> None:
    max_bs, width, row = 8, 65, 164
    assert patched(inside_ddtree_graphs.sizes, tree(width - 1), max_bs, width) == {
        "attn_logits": max_bs,
        "attn_lse": max_bs,
        "kv_indices": max_bs * row,
        "mask": max_bs * width * (row + width),
    }
    released = stock(inside_ddtree_graphs.sizes, CHAIN, max_bs, 8)
    assert patched(inside_ddtree_graphs.sizes, CHAIN, max_bs, 8) == released
    assert released["kv_indices"] == max_bs * 8 * 64 and released["attn_logits"] == max_bs * 8


def test_a_mask_in_its_buffer_is_not_copied_and_another_is(patched: Tree) -> None:
    own = patched(inside_ddtree_graphs.mask_copies, True)
    assert own == {
        "copies": 0,
        "buffer": True,
        "ones": False,
        "queries": [0, 17, 34],
        "masks": [0, 17 * (5 + 17), 17 * (5 + 17) + 17 * (9 + 17)],
    }
    other = patched(inside_ddtree_graphs.mask_copies, False)
    assert other["copies"] == 1 and other["ones"]


def test_split_kv_is_for_chains(patched: Tree) -> None:
    assert patched(inside_ddtree_graphs.split_kv, CHAIN) is True
    assert patched(inside_ddtree_graphs.split_kv, tree(16)) is False
