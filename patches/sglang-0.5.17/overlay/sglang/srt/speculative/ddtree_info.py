"""DDTREE: the verify input, and what a step executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A verify of trees: W = draft_token_num nodes a request, under a mask.

    custom_mask is required: without one the Triton backend verifies the nodes as a chain. It is the buffer that the
    captured kernel reads, or one in the same layout where no graph runs.
    """

    def __post_init__(self) -> None:
        """Raises ValueError without a mask."""
        super().__post_init__()
        if self.custom_mask is None:
            raise ValueError("DDTREE: a verify without a tree mask would be a chain's")

    def generate_attn_arg_prefill(self, *_: Any, **__: Any) -> Any:
        """Raises NotImplementedError: the backends that call it pad a mask of the wrong size with True."""
        raise NotImplementedError("DDTREE verifies on the Triton attention backend only")


@dataclass(frozen=True)
class Executed:
    """The largest figures over the trees of one step: nodes besides the root, children of one node, depth.

    Siblings that hold the same token count once: the second could never be accepted.
    """

    nodes: int
    max_children: int
    max_depth: int


def executed_shape(
    tokens: Sequence[Sequence[int]], next_token: Sequence[Sequence[int]], next_sibling: Sequence[Sequence[int]]
) -> Executed:
    """Measured as `verify_tree_greedy` walks: along the links, from each root. Each argument [bs][W]."""
    nodes = children = deepest = 0
    for ids, first, after in zip(tokens, next_token, next_sibling, strict=True):
        seen: set[tuple[int, int]] = set()
        depth_of = {0: 0}
        ahead = [0]
        while ahead:
            node = ahead.pop()
            child = first[node]
            while child != -1 and child not in depth_of:
                depth_of[child] = depth_of[node] + 1
                seen.add((node, ids[child]))
                ahead.append(child)
                child = after[child]
        deepest = max(deepest, *depth_of.values())
        nodes = max(nodes, len(seen))
        children = max(children, *Counter(node for node, _ in seen).values(), 0)
    return Executed(nodes, children, deepest)


def snapshot_lists(snapshot: tuple[Tensor, Tensor, Tensor]) -> Executed:
    """`executed_shape` of device arrays. Waits for them."""
    return executed_shape(*(array.tolist() for array in snapshot))
