"""09-ddtree-algorithm, 10-ddtree-arguments: what is served, under which widths, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.data import data_dir
from ddtree_ops.release.patchset import load_patchset

from . import inside_ddtree_arguments
from .marks import every_base
from .trees import Tree

pytestmark = every_base


def asked(tree: Tree, block: int | None = 8, /, environment: dict[str, str] | None = None, **arguments: Any) -> Any:
    return tree(inside_ddtree_arguments.resolved, block, arguments, environment or {})


@pytest.mark.parametrize(("budget", "topk", "block"), [(16, 4, 8), (7, 1, 8), (3, 2, 8), (64, 8, 16), (1, 1, 2)])
def test_the_verify_is_as_wide_as_the_tree_and_the_draft_as_the_block(
    budget: int, topk: int, block: int, patched: Tree
) -> None:
    told = asked(patched, block, speculative_ddtree_budget=budget, speculative_ddtree_topk=topk)
    assert told == {
        "num_draft_tokens": budget + 1,
        "dflash_block_size": block,
        "eagle_topk": 1,
        "num_steps": 1,
        "ddtree_budget": budget,
        "ddtree_topk": topk,
        "draft_backend": "triton",
    }


def test_the_command_line_has_its_flags(base: str, patched: Tree) -> None:
    """Those that the release's smoke test asks for."""
    flags = {"--speculative-ddtree-budget", "--speculative-ddtree-topk", "--speculative-ddtree-ladder"}
    assert set(patched(inside_ddtree_arguments.flags)) == flags
    smoke = load_patchset(data_dir("patches") / base).smoke
    assert set(smoke) == {"algorithm DDTREE", *(f"flag {flag}" for flag in flags)}


def test_the_width_may_be_said_and_must_then_be_right(patched: Tree) -> None:
    assert asked(patched, speculative_num_draft_tokens=17)["num_draft_tokens"] == 17
    refused = asked(patched, speculative_num_draft_tokens=16)["refused"]
    assert "budget + 1 = 17" in refused and "--speculative-num-draft-tokens 16" in refused


REFUSED: dict[str, dict[str, Any]] = {
    "from 8 requests on the budget must be below 16, not 16": {"speculative_ddtree_ladder": "8:16"},
    "--speculative-ddtree-budget": {"speculative_ddtree_budget": None},
    "--speculative-ddtree-topk of at least 1": {"speculative_ddtree_topk": 0},
    "--speculative-draft-model-path": {"speculative_draft_model_path": None},
    "give 7 nodes": {"speculative_ddtree_topk": 1, "speculative_ddtree_budget": 8},
    "--speculative-dflash-block-size 4 is not": {"speculative_dflash_block_size": 4},
    "attention backends fa3 and fa3": {"attention_backend": "fa3"},
    "attention backends flashinfer and triton": {"prefill_attention_backend": "flashinfer"},
    "attention backends None and None": {"attention_backend": None},
    "--enable-dp-attention": {"enable_dp_attention": True},
    "--pp-size 2": {"pp_size": 2},
    "--dcp-size 2": {"dcp_size": 2},
    "--page-size 48, no power of two,": {"page_size": 48},
    "--enable-deterministic-inference": {"enable_deterministic_inference": True},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-lora": {"enable_lora": True},
    "--speculative-adaptive": {"speculative_adaptive": True},
    "--disaggregation-mode decode": {"disaggregation_mode": "decode"},
    "--speculative-num-steps 3": {"speculative_num_steps": 3},
    "--speculative-eagle-topk 4": {"speculative_eagle_topk": 4},
    "--speculative-use-rejection-sampling": {"speculative_use_rejection_sampling": True},
    "--speculative-draft-window-size": {"speculative_draft_window_size": 64},
    "--disable-cuda-graph-padding": {"disable_cuda_graph_padding": True},
    "--kv-canary raise with branches": {"kv_canary": "raise"},
    "device cpu": {"device": "cpu"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_served_is_refused_by_name(words: str, patched: Tree) -> None:
    refused = asked(patched, **REFUSED[words])["refused"]
    assert words in refused and "DDTREE" in refused


@pytest.mark.parametrize(
    "name",
    ["SGLANG_DFLASH_EAGER_DRAFT_SAMPLER", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_SIMULATE_ACC_LEN"],
)
def test_switches_of_the_environment_too(name: str, patched: Tree) -> None:
    given = {"SIMULATE_ACC_LEN": "3"} if name.endswith("ACC_LEN") else {name: "1"}
    assert asked(patched, 8, given)["refused"] == f"DDTREE does not support {name} yet."


def test_a_drafter_without_a_block_size_is_refused_not_guessed(patched: Tree) -> None:
    assert "no usable block_size" in asked(patched, None)["refused"]


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_pages_of_a_power_of_two_are_served(size: int, patched: Tree) -> None:
    assert asked(patched, page_size=size)["num_draft_tokens"] == 17


def test_a_chain_as_a_tree_may_have_the_kv_canary(patched: Tree) -> None:
    chain = {"speculative_ddtree_budget": 7, "speculative_ddtree_topk": 1, "kv_canary": "raise"}
    assert asked(patched, **chain)["num_draft_tokens"] == 8


@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
def test_its_flags_need_it(algorithm: str | None, patched: Tree) -> None:
    refused = asked(patched, speculative_algorithm=algorithm)["refused"]
    assert refused == f"--speculative-ddtree-budget needs --speculative-algorithm DDTREE, got {algorithm}."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"token_to_kv_pool": "MLATokenToKVPool"}, []),
        ({"attn_backend": "HybridAttnBackend"}, ["the attention backend HybridAttnBackend"]),
        ({"window": 128}, ["a sliding window of 128"]),
        ({"mamba": {}}, ["a target with recurrent layers"]),
        ({"token_to_kv_pool": "MLATokenToKVPoolFP4"}, ["a KV pool of type MLATokenToKVPoolFP4"]),
        ({"pool": {"use_hnd": True}}, ["KV in the HND layout"]),
        ({"pool": {"k_scale_buffer": []}}, ["quantised KV with scales"]),
        ({"topk": 101}, ["--speculative-ddtree-topk 101 over a vocabulary of 100"]),
        ({"head": {"num_added_embeddings": 16}}, ["a head with added vocabulary"]),
        ({"head": {"tp_size": 1}}, ["a head that every rank has whole"]),
    ],
)
def test_what_only_the_loaded_target_tells(change: dict[str, Any], words: list[str], patched: Tree) -> None:
    assert patched(inside_ddtree_arguments.refused_target, change) == words


def test_sglang_asks_and_gets_both_widths(patched: Tree) -> None:
    told = patched(inside_ddtree_arguments.widths)
    assert told["predicates"] == [True, True, False]
    assert told["plugin"] is False
    assert told["worker"] == "DDTreeWorker"
    assert told["relay"] is False
    assert told["target"] == [17, "DDTreeVerifyInput", 17, True]
    assert told["draft"] == [8, "DFlashVerifyInput", 8, False]
    assert "without a tree mask" in told["maskless"]


def test_no_backend_may_pad_its_mask(patched: Tree) -> None:
    assert "Triton attention backend only" in patched(inside_ddtree_arguments.mask_padding)
