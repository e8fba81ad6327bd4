"""overlay ddtree_worker: whole decode steps, exact against the target's own text, metadata captured and not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.release.udiff import apply_diff, parse_diff, split_patch

from . import inside_ddtree_steps
from .marks import NEWEST
from .trees import BASE, ROOT, Tree

FAULTS = ROOT / "tests" / "gpu" / "faults"
OVERLAY_FAULTS = (
    "mask-rows-by-block-size",
    "mask-offset-of-second-request",
    "mask-all-blocked",
    "rope-by-index",
    "stale-kv",
    "hidden-of-wrong-node",
    "walk-past-mismatch",
    "pad-node-accepted",
    "lenient-acceptance",
)

EAGER, CAPTURED = 0, 3
PAIRS = [(4, 6, 3), (4, 3, 1), (6, 2, 2), (4, 12, 4)]
"""(block, budget, topk): a tree, a chain as a tree, a tree narrower than the block, a wide one."""
STEPS = [
    *((BASE, *pair, graphs) for pair in PAIRS for graphs in (EAGER, CAPTURED)),
    (NEWEST, 4, 6, 3, CAPTURED),
    (NEWEST, 8, 7, 1, EAGER),
]


def setting(block: int, budget: int, topk: int, graphs: int) -> dict[str, int]:
    return {"block": block, "budget": budget, "topk": topk, "graphs": graphs}


@pytest.mark.parametrize(("base", "block", "budget", "topk", "graphs"), STEPS, indirect=["base"])
def test_the_text_its_kv_and_its_features_are_the_targets(
    block: int, budget: int, topk: int, graphs: int, interpreted: Tree
) -> None:
    told = interpreted(inside_ddtree_steps.decoded, setting(block, budget, topk, graphs), [5, 11], 12)
    assert told["wrong"] is None
    assert max(told["commits"]) > 1
    nodes, children, depth = told["executed"]
    assert nodes == budget and 1 <= children <= topk and depth <= min(block - 1, budget)


@pytest.mark.parametrize(
    ("base", "fault"),
    [*((BASE, fault) for fault in OVERLAY_FAULTS), (NEWEST, "mask-rows-by-block-size")],
    indirect=["base"],
)
def test_each_planted_fault_is_seen(fault: str, interpreted: Tree) -> None:
    """The seed bug is the first of them: rows of the mask block_size apart, where W is not block_size."""
    patch = str(FAULTS / f"{fault}.patch")
    told = interpreted(inside_ddtree_steps.decoded, setting(4, 6, 3, CAPTURED), [5, 11], 24, patch)
    assert told["wrong"] is not None


@pytest.mark.parametrize(("base", "graphs"), [(BASE, EAGER), (BASE, CAPTURED), (NEWEST, EAGER)], indirect=["base"])
def test_by_sglangs_own_attention_kernel_the_text_is_the_targets(graphs: int, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_steps.decoded, setting(4, 6, 3, graphs), [5, 40], 12, None, None, False)
    assert told["wrong"] is None
    assert max(told["commits"]) > 1


@pytest.mark.parametrize("fault", ["mask-rows-by-block-size", "mask-offset-of-second-request", "mask-all-blocked"])
def test_with_the_prefix_split_a_wrong_mask_is_seen(fault: str, interpreted: Tree) -> None:
    patch = str(FAULTS / f"{fault}.patch")
    told = interpreted(inside_ddtree_steps.decoded, setting(4, 6, 3, CAPTURED), [5, 11], 24, patch, None, True)
    assert told["wrong"] is not None


def test_what_only_leaves_out_the_canary_is_no_fault(interpreted: Tree) -> None:
    patch = str(FAULTS / "no-canary.patch")
    told = interpreted(inside_ddtree_steps.decoded, setting(4, 6, 3, CAPTURED), [5, 11], 8, patch)
    assert told["wrong"] is None


def test_a_mask_by_block_size_is_harmless_where_the_tree_is_as_wide(interpreted: Tree) -> None:
    """Why it was not seen: it is right for every tree of block_size nodes."""
    patch = str(FAULTS / "mask-rows-by-block-size.patch")
    told = interpreted(inside_ddtree_steps.decoded, setting(4, 3, 2, CAPTURED), [5, 11], 12, patch)
    assert told["wrong"] is None


def test_every_fault_is_one_that_fits(patched_site: Path) -> None:
    """Those that need a GPU too: each changes one file of the patched tree, exactly where it says."""
    there = {path.stem for path in FAULTS.glob("*.patch")}
    sampled = {name for name in there if name.startswith("sampled-")}
    assert there - sampled == {*OVERLAY_FAULTS, "padded-rows-write-live-slots", "no-canary"} and len(sampled) == 5
    for path in sorted(FAULTS.glob("*.patch")):
        (diff,) = parse_diff(split_patch(path.read_bytes())[1], path.name)
        before = (patched_site / diff.path).read_bytes()
        assert apply_diff(diff, before, path.name) != before
