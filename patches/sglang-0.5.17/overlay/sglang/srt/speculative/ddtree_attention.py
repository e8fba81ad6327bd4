"""DDTREE: attention of a verify, and of a draft pass, with the prefix split over programs.

SGLang's extend kernel walks a request's whole prefix in one program a query head. A verify has a few queries and a long
prefix: at 8,000 tokens its attention took 24 ms of a step whose matrix products took 6 (docs/sglang.md). Here a program
takes one share of the prefix for one KV head, all nodes and all query heads that read it, so keys and values are read
once; one more program takes the nodes themselves under their mask; a second kernel merges by the shares' log-sums, as
flash decoding does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SHARES = 16
MIN_KEYS = 128
"""Of a share. A short prefix leaves the last ones empty: a captured graph has as many as its shapes allow."""


@dataclass(frozen=True)
class Tiles:
    """rows: nodes times query heads of a program; columns: keys at a time; programs: how many an SM should have."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 2


TILES = {
    # (bytes of a head, at most; rows; whether the prefix is split): the fastest or near it (benchmarks/gpu/attention)
    (128, 64, True): Tiles(64, 64, 4, 2),
    (128, 64, False): Tiles(64, 64, 4, 3),
    (128, 128, True): Tiles(128, 64, 8, 2, programs=1),
    (128, 128, False): Tiles(128, 64, 4, 3, programs=1),
    (256, 64, True): Tiles(64, 32, 4, 2),
    (256, 64, False): Tiles(64, 32, 4, 3),
    (256, 128, True): Tiles(128, 64, 8, 2, programs=1),
    (256, 128, False): Tiles(128, 64, 4, 2, programs=1),
    # as much as the smallest card's shared memory takes
    (1024, 64, True): Tiles(64, 32, 4, 2),
    (1024, 64, False): Tiles(64, 32, 4, 2),
}
"""None has fewer than 64 rows, the least that Hopper's matrix units take at once."""


def tiles_of(rows: int, head_dim: int, item_bytes: int, split: bool) -> Tiles:
    """rows: nodes times query heads a KV head. Shared memory of each card: results/cards/kernels.txt.

    float32 is multiplied without matrix units (IEEE), out of more shared memory and registers.
    """
    size = 1024 if item_bytes > 2 else next(most for most in (128, 256, 1024) if head_dim * item_bytes <= most)
    return TILES[size, 128 if rows > 64 and size < 1024 else 64, split]


def handles(head_dim: int, v_head_dim: int) -> bool:
    """Whether heads are of a size that the kernels take; MLA's are not."""
    return head_dim == v_head_dim and 16 <= head_dim <= 256


@triton.jit
def _add(q, k, v, seen, best, total, acc, scale, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Online softmax over some more keys. A row that has seen nothing yet keeps best -inf and total 0."""
    scores = tl.dot(q, k) * scale
    if CAPPED:
        scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    decay = tl.exp(best - base)
    return higher, total * decay + tl.sum(weights, 1), acc * decay[:, None] + tl.dot(weights.to(v.dtype), v)


# One compilation serves every number of nodes and shares.
@triton.jit(do_not_specialize=["width", "shares"])
def _attend_share(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    pool_k_ptr,
    pool_v_ptr,
    out_ptr,
    log_sum_ptr,
    o_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    mask_ptr,
    mask_indptr_ptr,
    scale,
    cap,
    o_row,
    o_head,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    pool_k_row,
    pool_k_head,
    pool_v_row,
    pool_v_head,
    width,
    shares,
    kv_heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    share = tl.program_id(2)
    rows = tl.program_id(1) // kv_heads * ROWS + tl.arange(0, ROWS)
    node = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = node < width
    dims = tl.arange(0, BLOCK_D)
    inside = dims < DIM
    nodes = request * width
    q_places = (nodes + node)[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    q = tl.load(q_ptr + q_places, mask=live[:, None] & inside[None, :], other=0.0)

    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    start = tl.load(kv_indptr_ptr + request).to(tl.int64)
    prefix = (tl.load(kv_indptr_ptr + request + 1) - start).to(tl.int32)
    if share < shares:
        size = prefix
        if SPLIT:
            size = tl.cdiv(tl.maximum(tl.cdiv(prefix, shares), LEAST), COLUMNS) * COLUMNS
        end = tl.minimum(share * size + size, prefix)
        for begin in range(share * size, end, COLUMNS):
            keys = begin + tl.arange(0, COLUMNS)
            there = keys < end
            slots = tl.load(kv_indices_ptr + start + keys, mask=there, other=0).to(tl.int64)
            k_places = slots[None, :] * pool_k_row + kv_head * pool_k_head + dims[:, None]
            k = tl.load(pool_k_ptr + k_places, mask=inside[:, None] & there[None, :], other=0.0)
            v_places = slots[:, None] * pool_v_row + kv_head * pool_v_head + dims[None, :]
            v = tl.load(pool_v_ptr + v_places, mask=there[:, None] & inside[None, :], other=0.0)
            best, total, acc = _add(
                q.to(k.dtype), k, v, there[None, :] & live[:, None], best, total, acc, scale, cap, CAPPED
            )
    if share == shares or not SPLIT:
        row_of_mask = node
        if MASKED:
            # a row of the mask: the prefix's cells, which nobody reads, then the nodes'
            row_of_mask = tl.load(mask_indptr_ptr + request) + node * (prefix + width).to(tl.int64) + prefix
        for begin in range(0, width, COLUMNS):
            keys = begin + tl.arange(0, COLUMNS)
            there = keys < width
            k_places = (nodes + keys)[None, :] * k_row + kv_head * k_head + dims[:, None]
            k = tl.load(k_ptr + k_places, mask=inside[:, None] & there[None, :], other=0.0)
            v_places = (nodes + keys)[:, None] * v_row + kv_head * v_head + dims[None, :]
            v = tl.load(v_ptr + v_places, mask=there[:, None] & inside[None, :], other=0.0)
            seen = there[None, :] & live[:, None]
            if MASKED:
                seen = tl.load(mask_ptr + row_of_mask[:, None] + keys[None, :], mask=seen, other=0) != 0
            best, total, acc = _add(q, k, v, seen, best, total, acc, scale, cap, CAPPED)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    written = live[:, None] & inside[None, :]
    if SPLIT:
        places = ((request * (shares + 1) + share) * width + node) * (kv_heads * GROUP) + head
        tl.store(log_sum_ptr + places, tl.where(total > 0, best + tl.log(total), float("-inf")), mask=live)
        # nobody reads what an empty share has not summed
        summed = written & (total > 0)[:, None]
        tl.store(out_ptr + places[:, None] * DIM + dims[None, :], result, mask=summed)
    else:
        places = (nodes + node)[:, None] * o_row + head[:, None] * o_head + dims[None, :]
        tl.store(o_ptr + places, result.to(o_ptr.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["width", "parts"])
def _merge_shares(  # type: ignore[no-untyped-def]
    out_ptr,
    log_sum_ptr,
    o_ptr,
    o_row,
    o_head,
    width,
    heads,
    parts,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request, node = row // width, row % width
    part = tl.arange(0, PARTS)
    dims = tl.arange(0, BLOCK_D)
    places = ((request * parts + part) * width + node) * heads + head
    log_sums = tl.load(log_sum_ptr + places, mask=part < parts, other=float("-inf"))
    weights = tl.exp(log_sums - tl.max(log_sums, 0))
    read = (log_sums > float("-inf"))[:, None] & (dims < DIM)[None, :]
    results = tl.load(out_ptr + places[:, None] * DIM + dims[None, :], mask=read, other=0.0)
    merged = tl.sum(weights[:, None] * results, 0) / tl.sum(weights, 0)
    tl.store(o_ptr + row * o_row + head * o_head + dims, merged.to(o_ptr.dtype.element_ty), mask=dims < DIM)


@functools.cache
def _processors(device: torch.device) -> int:
    """How many the card has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 8


def shares_of(programs: int, alone: int) -> int:
    """Into how many shares a prefix is cut, so that there are about so many ``programs``: from shapes, which a captured
    graph knows. alone: programs without a split."""
    return max(1, min(MAX_SHARES, programs // alone))


def split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None,
    mask_indptr: Tensor | None,
    width: int,
    scale: float,
    cap: float = 0.0,
    shares: int | None = None,
) -> None:
    """Writes o: [bs * width, heads, D], what the queries q (the same shape) see of their prefix and of each other.

    k, v: [bs * width, KV heads, D], the nodes' own. pool_k, pool_v: [slots, KV heads, D]. kv_indptr: [bs + 1];
    kv_indices: the slots of the prefixes. mask: `ddtree_mask`'s, of which the nodes' cells are read; None: all nodes
    see each other. cap: of the scores, 0 for none. shares: default as the card likes it.
    """
    rows, heads, dim = q.shape
    kv_heads, bs = k.shape[1], rows // width
    group = heads // kv_heads
    tiles = tiles_of(width * group, dim, q.element_size(), True)
    row_tiles = triton.cdiv(width * group, tiles.rows)
    shares = shares or shares_of(tiles.programs * _processors(q.device), bs * kv_heads * row_tiles)
    split = shares > 1
    if not split:
        tiles = tiles_of(width * group, dim, q.element_size(), False)
    parts = shares + 1 if split else 0
    out = torch.empty((bs, parts, width * heads, dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((bs, parts, width * heads), dtype=torch.float32, device=q.device)
    block = {"DIM": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim))}
    strides = [stride for each in (o, q, k, v, pool_k, pool_v) for stride in each.stride()[:2]]
    _attend_share[(bs, kv_heads * row_tiles, max(parts, 1))](
        *(q, k, v, pool_k, pool_v, out, log_sums, o, kv_indptr, kv_indices),
        *(q if mask is None else mask, kv_indptr if mask_indptr is None else mask_indptr),
        *(scale, cap, *strides, width, shares, kv_heads),
        **block,
        GROUP=group,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        MASKED=mask is not None,
        CAPPED=cap > 0,
        SPLIT=split,
        LEAST=MIN_KEYS,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if split:
        _merge_shares[(rows, heads)](
            *(out, log_sums, o, *o.stride()[:2], width, heads, parts),
            **block,
            PARTS=triton.next_power_of_2(parts),
            num_warps=1,
        )
