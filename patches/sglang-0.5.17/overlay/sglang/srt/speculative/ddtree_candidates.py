"""DDTREE: the best candidates of each drafted position, from the head's logits.

Two kernels instead of torch's thirty, which on an H200 took 0.13 ms of a step of 7.5, mostly their begin and end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST: tl.constexpr = tl.constexpr(-3e38)
"""A logit of a token that is there, at least: what is not there is minus infinity, and comes behind."""
CHUNK = 4096
"""Of the vocabulary, a program's."""


@triton.jit(do_not_specialize=["vocabulary", "chunks", "topk"])
def _best_of_chunk(  # type: ignore[no-untyped-def]
    logits_ptr, values_ptr, ids_ptr, tops_ptr, sums_ptr, row_stride, vocabulary, chunks, topk, CHUNK: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, CHUNK)
    ids = chunk * CHUNK + lanes
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    # a drafter that fails gives trees that are not accepted, not trees out of nowhere
    logits = tl.where(logits == logits, logits, float("-inf"))
    top = tl.max(logits, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    place = row * chunks + chunk
    tl.store(tops_ptr + place, top)
    tl.store(sums_ptr + place, tl.sum(tl.exp(logits - base), 0))
    left = tl.where(ids < vocabulary, tl.maximum(logits, LOWEST), float("-inf"))
    for rank in range(topk):
        value, at = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values_ptr + place * topk + rank, value)
        tl.store(ids_ptr + place * topk + rank, chunk * CHUNK + at)
        left = tl.where(lanes == at, float("-inf"), left)


@triton.jit(do_not_specialize=["chunks", "topk"])
def _best_of_row(  # type: ignore[no-untyped-def]
    values_ptr,
    ids_ptr,
    tops_ptr,
    sums_ptr,
    best_ptr,
    best_ids_ptr,
    totals_ptr,
    chunks,
    topk,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(tops_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(totals_ptr + row, base + tl.log(tl.sum(sums * tl.exp(tops - base), 0)))
    # chunk by chunk, each in its order: among equal values the lowest id comes first
    lanes = tl.arange(0, BLOCK)
    begin = row * chunks * topk
    left = tl.load(values_ptr + begin + lanes, mask=lanes < chunks * topk, other=float("-inf"))
    for rank in range(topk):
        value, at = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_ptr + row * topk + rank, value)
        tl.store(best_ids_ptr + row * topk + rank, tl.load(ids_ptr + begin + at).to(tl.int64))
        left = tl.where(lanes == at, float("-inf"), left)


def top_logprobs(logits: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, ids, log of the sum of exponentials) of the ``topk`` best of each row: [n, K] float32, [n, K], [n].

    logits: [n, vocabulary], any floating type. Equal values: lower id first, so one candidate is argmax's, the chain's.
    A vocabulary of fewer than ``topk`` (a shard's) gives minus infinity for those that it has not.
    """
    rows, vocabulary = logits.shape
    chunks = max(1, triton.cdiv(vocabulary, CHUNK))
    values = logits.new_empty((rows, chunks, topk), dtype=torch.float32)
    ids = logits.new_empty((rows, chunks, topk), dtype=torch.int32)
    tops, sums = (logits.new_empty((rows, chunks), dtype=torch.float32) for _ in range(2))
    best, best_ids = values.new_empty((rows, topk)), logits.new_empty((rows, topk), dtype=torch.int64)
    totals = values.new_empty((rows,))
    _best_of_chunk[(rows, chunks)](
        *(logits, values, ids, tops, sums, logits.stride(0), vocabulary, chunks, topk),
        CHUNK=min(CHUNK, max(16, triton.next_power_of_2(vocabulary))),
    )
    _best_of_row[(rows,)](
        *(values, ids, tops, sums, best, best_ids, totals, chunks, topk),
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=triton.next_power_of_2(chunks * topk),
        num_warps=1,
    )
    return best, best_ids, totals


def merge_shards(values: Tensor, ids: Tensor, totals: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities [n, K], global ids [n, K]) of vocabulary shards gathered in rank order.

    values, ids: [shards, n, K], ids already global and ascending from shard to shard. totals: [shards, n]. Equal
    values: lower id first, because a shard's own ties are in that order and the sort is stable.
    """
    count = values.shape[1]
    flat = values.permute(1, 0, 2).reshape(count, -1)
    best, order = flat.sort(dim=1, descending=True, stable=True)
    chosen = ids.permute(1, 0, 2).reshape(count, -1).gather(1, order[:, :topk])
    return best[:, :topk] - torch.logsumexp(totals, dim=0).unsqueeze(1), chosen
