"""Trees over a target with latent attention (MLA): whole steps, the canary, the kernel at DeepSeek's sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.longer import longer

from . import inside_ddtree_kernels, inside_ddtree_steps
from .test_ddtree_steps import CAPTURED, EAGER, FAULTS, OVERLAY_FAULTS, PAIRS, setting
from .trees import Tree

STOPPED = ("mask-rows-by-block-size", "mask-offset-of-second-request", "mask-all-blocked", "rope-by-index")


def latent(block: int, budget: int, topk: int, graphs: int) -> dict[str, Any]:
    return {**setting(block, budget, topk, graphs), "latent": True}


@pytest.mark.parametrize("graphs", [EAGER, CAPTURED])
@pytest.mark.parametrize(("block", "budget", "topk"), [PAIRS[0], longer(*PAIRS[-1])])
def test_the_text_its_latents_and_its_features_are_the_targets(
    block: int, budget: int, topk: int, graphs: int, interpreted: Tree
) -> None:
    told = interpreted(inside_ddtree_steps.decoded, latent(block, budget, topk, graphs), [5, 11], 12)
    assert told["wrong"] is None
    assert max(told["commits"]) > 1


@pytest.mark.parametrize("fault", [OVERLAY_FAULTS[0], *map(longer, OVERLAY_FAULTS[1:])])
def test_each_planted_fault_is_seen(fault: str, interpreted: Tree) -> None:
    patch = str(FAULTS / f"{fault}.patch")
    told = interpreted(inside_ddtree_steps.decoded, latent(4, 6, 3, CAPTURED), [5, 11], 24, patch)
    assert told["wrong"] is not None


def test_the_canary_passes(interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_steps.started, latent(4, 6, 3, CAPTURED))
    assert told["said"] is None and told["table"]


@pytest.mark.parametrize("fault", [STOPPED[0], *map(longer, STOPPED[1:])])
def test_the_canary_stops_a_wrong_mask(fault: str, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_steps.started, latent(4, 6, 3, CAPTURED), str(FAULTS / f"{fault}.patch"))
    assert "DDTREE start-up canary" in told["said"]


@pytest.mark.parametrize(
    ("width", "rank", "rope", "page"), [(9, 512, 64, 1), (65, 256, 32, 1), (17, 512, 64, 64), (33, 32, 16, 16)]
)
def test_attention_over_latents_is_the_trees(width: int, rank: int, rope: int, page: int, interpreted: Tree) -> None:
    """512 and 64 are DeepSeek's and Kimi's; 65 nodes take three of the kernel's tiles."""
    told = interpreted(inside_ddtree_kernels.attention_apart, 6, width, [7, 70], rank + rope, rank, page)
    assert told["apart"] < 1e-5
    assert told["as_chain"] > 0.1
