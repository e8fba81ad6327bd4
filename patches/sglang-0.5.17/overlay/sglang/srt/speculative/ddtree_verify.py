"""DDTREE: what a verify accepts, and the commit of the accepted path: its KV and its hidden states.

After a verify the KV of node i lies in slot i of the W slots that follow the prefix. The accepted path's is moved to
the first of them, in the path's order, because the text that follows reads it there, and because the radix cache keeps
slots in the text's order. K carries its RoPE already: a node's position is its depth, and so is its place on the path.

Slots are those gathered before the verify. ``req_to_token`` is not read again: the scheduler may rewrite it as soon as
the verify's graph has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 512


@dataclass(frozen=True)
class Accepted:
    """What a verify gave each request, B = block_size.

    path: int64 [bs, B], the accepted nodes from the root down, then zeros. commit_lens: int32 [bs], nodes on the path,
    which is tokens gained, the bonus included: 1 to B. tokens: int64 [bs, B], the target's token after each node of
    the path. bonus: int64 [bs], the last of them.
    """

    path: Tensor
    commit_lens: Tensor
    tokens: Tensor
    bonus: Tensor


def walk(
    candidates: Tensor, next_token: Tensor, next_sibling: Tensor, target_predict: Tensor, block_size: int
) -> Accepted:
    """Follow the target's own tokens from each root down, by SGLang's verify kernel.

    candidates, next_token, next_sibling: int64 [bs, W] as in `DraftTrees`. target_predict: int64 [bs, W], the target's
    token after each node. No path is longer than ``block_size`` nodes.
    """
    from sglang.srt.speculative.ddtree_base import verify_tree_greedy_func, verify_tree_greedy_triton

    bs, width = candidates.shape
    device = candidates.device
    rows = torch.arange(bs * width, dtype=torch.int64, device=device).view(bs, width)
    accept_index = torch.full((bs, block_size), -1, dtype=torch.int32, device=device)
    correct_drafts = torch.empty((bs,), dtype=torch.int32, device=device)
    verify = verify_tree_greedy_func if candidates.is_cuda else verify_tree_greedy_triton
    verify(
        torch.zeros((bs * width,), dtype=torch.int32, device=device),
        accept_index,
        correct_drafts,
        candidates,
        rows,
        next_token,
        next_sibling,
        target_predict,
    )
    path = torch.where(accept_index >= 0, accept_index.long() - rows[:, :1], 0)
    tokens = target_predict.gather(1, path)
    bonus = tokens.gather(1, correct_drafts.long().unsqueeze(1)).squeeze(1)
    return Accepted(path, correct_drafts + 1, tokens, bonus)


@triton.jit
def _move_path(  # type: ignore[no-untyped-def]
    data_ptrs,
    row_bytes_ptr,
    slots_ptr,
    path_ptr,
    commit_lens_ptr,
    slots_stride,
    path_stride,
    TILE: tl.constexpr,
):
    buffer = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.program_id(2)
    row_bytes = tl.load(row_bytes_ptr + buffer)
    base = tl.cast(tl.load(data_ptrs + buffer), tl.pointer_type(tl.uint8))
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < row_bytes
    for place in range(1, tl.load(commit_lens_ptr + request)):
        node = tl.load(path_ptr + request * path_stride + place)
        source = tl.load(slots_ptr + request * slots_stride + node)
        target = tl.load(slots_ptr + request * slots_stride + place)
        moved = inside & (source != target)
        row = tl.load(base + source * row_bytes + columns, mask=moved)
        tl.store(base + target * row_bytes + columns, row, mask=moved)


class PathMover:
    """Moves the KV of accepted paths in one launch over all layers.

    A path ascends (node >= place), so a slot that was written at a place is the source of no later place; each thread
    moves its own bytes of all rows in turn, so no two threads meet. (``move_kv_cache`` of the pools loads all rows
    before it stores any, in several warps without a barrier between them: overlapping rows may be lost.)
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        """buffers: the pool's, one or two a layer, [slots, ...], rows contiguous. Raises ValueError for others."""
        for buffer in buffers:
            if not buffer[0].is_contiguous() or buffer.stride(0) != buffer[0].numel():
                raise ValueError(f"DDTREE moves whole rows of KV, got strides {buffer.stride()}")
        device = buffers[0].device
        sizes = [buffer[0].numel() * buffer.element_size() for buffer in buffers]
        self._data_ptrs = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device=device)
        self._row_bytes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._grid = (len(sizes), triton.cdiv(max(sizes), TILE_BYTES))

    def move(self, slots: Tensor, accepted: Accepted) -> None:
        """slots: int64 [bs, at least W], gathered before the verify; slot i of a row holds node i's KV."""
        _move_path[(*self._grid, slots.shape[0])](
            self._data_ptrs,
            self._row_bytes,
            slots,
            accepted.path,
            accepted.commit_lens,
            slots.stride(0),
            accepted.path.stride(0),
            TILE=TILE_BYTES,
        )


def path_rows(accepted: Accepted, width: int) -> Tensor:
    """int64 [bs, B]: rows of the verify's logits and hidden states [bs * W, ...] along the accepted paths."""
    starts = torch.arange(accepted.path.shape[0], dtype=torch.int64, device=accepted.path.device) * width
    return accepted.path + starts.unsqueeze(1)


def check_accepted(accepted: Accepted, depths: Tensor, block_size: int) -> None:
    """Raises AssertionError for a result that no walk of these trees gives. Waits for the device: for debugging."""
    lens = accepted.commit_lens
    assert bool(((lens >= 1) & (lens <= block_size)).all()), f"commit lengths {lens.tolist()} of blocks of {block_size}"
    places = torch.arange(block_size, device=lens.device)
    on_path = places < lens.unsqueeze(1)
    depth = depths.gather(1, accepted.path)
    assert bool(((depth == places) | ~on_path).all()), f"accepted nodes at depths {depth.tolist()}"
    rising = accepted.path[:, 1:] > accepted.path[:, :-1]
    assert bool((rising | ~on_path[:, 1:]).all()), f"accepted path {accepted.path.tolist()}"
