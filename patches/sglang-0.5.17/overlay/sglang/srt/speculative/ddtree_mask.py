"""DDTREE: the tree mask, written in place into the buffer that the Triton backend's captured kernel reads.

The layout is SGLang's FULL_MASK: requests one behind the other, W rows each, a row being L + W cells (L the request's
prefix); cell [i, L + j] says whether node i may attend to node j. The kernel reads only those W x W cells of a request
(``extend_attention_fwd`` skips the mask over the prefix), so only they are written.

Rows are W + L apart and requests W * (L + W), with W the number of nodes and never the drafter's block_size: rows
written block_size apart once made correct trees look bad.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_cells(  # type: ignore[no-untyped-def]
    mask_ptr,
    parents_ptr,
    seq_lens_ptr,
    parents_stride,
    width,
    LEVELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_BS: tl.constexpr,
):
    request = tl.program_id(0)
    node = tl.program_id(1)
    others = tl.arange(0, BLOCK_BS)
    before = tl.load(seq_lens_ptr + others, mask=others < request, other=0).to(tl.int64)
    start = width * (tl.sum(before, axis=0) + request.to(tl.int64) * width)
    prefix = tl.load(seq_lens_ptr + request).to(tl.int64)
    row = start + node * (prefix + width) + prefix
    columns = tl.arange(0, BLOCK_W)
    current = node.to(tl.int64)
    seen = columns == current
    for _ in range(LEVELS):
        current = tl.load(parents_ptr + request * parents_stride + current)
        seen = seen | (columns == current)
    tl.store(mask_ptr + row + columns, seen.to(tl.uint8), mask=columns < width)


def write_mask(buffer: Tensor, parents: Tensor, seq_lens: Tensor, levels: int) -> None:
    """Write the tree cells of every request; no other byte of the buffer is touched.

    buffer: uint8, flat. parents: int64 [bs, W], ascending (parent index < child index). seq_lens: [bs], the prefix
    lengths that the backend computes its mask offsets from. levels: no node is deeper.
    """
    bs, width = parents.shape
    _write_cells[(bs, width)](
        buffer,
        parents,
        seq_lens,
        parents.stride(0),
        width,
        LEVELS=levels,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_BS=triton.next_power_of_2(bs),
    )


def cells_of(parents: Tensor, levels: int) -> Tensor:
    """bool [bs, W, W]: node i sees itself and its ancestors only. The plain form, for checks."""
    bs, width = parents.shape
    nodes = torch.arange(width, device=parents.device).expand(bs, width)
    cells = torch.zeros((bs, width, width), dtype=torch.bool, device=parents.device)
    current = nodes
    for _ in range(levels + 1):
        cells.scatter_(2, current.unsqueeze(2), True)
        current = parents.gather(1, current)
    return cells


def read_mask(buffer: Tensor, seq_lens: list[int], width: int) -> Tensor:
    """bool [bs, W, W]: the cells as the attention kernel finds them. Not for the hot path: offsets are host numbers."""
    cells, start = [], 0
    for prefix in seq_lens:
        block = buffer[start : start + width * (prefix + width)].view(width, prefix + width)
        cells.append(block[:, prefix:] != 0)
        start += width * (prefix + width)
    return torch.stack(cells)


def mask_cells(bs: int, width: int, prefix_sum: int) -> int:
    """Bytes that the masks of ``bs`` requests take, whose prefixes have ``prefix_sum`` tokens together, or fewer."""
    return width * (prefix_sum + bs * width)
