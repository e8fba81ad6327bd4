"""DDTREE: from the drafter's log-probabilities to trees, for a whole batch, in operations that a CUDA graph can hold.

A DFlash drafter predicts every position independently of the others, so the log-probability of a path is the sum of
one entry a position (DDTree, arXiv 2604.12989). The tree is the ``budget`` most probable prefixes. Because log p <= 0 a
node never comes before its parent, hence parent index < child index: the Triton kernel's causal clip relies on it.

Everything here has static shapes: W = budget + 1 nodes a request, node 0 the root, which is the last token of the text
(the bonus token of the step before). One kernel grows a tree. In torch's own operations the same took 150, on an H200
0.25 ms of a step of 7.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOOR = -1e30
"""Log-probability of what has none. Finite, so that sums over a path still compare."""
REQUESTS = 1
"""Of a program of the kernel."""


@dataclass(frozen=True)
class DraftTrees:
    """One tree a request, each array int64 [bs, W] unless said.

    parents: index of each node's parent, 0 for the root. depths: 0 for the root. ranks: which candidate of its position
    a node is, -1 for the root. next_token: a node's first child, next_sibling: the next child of the same parent, -1
    where there is none: what ``verify_tree_greedy`` walks (there called retrive_next_token, retrive_next_sibling).
    tokens: the root's is the text's last token.
    """

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    next_token: Tensor
    next_sibling: Tensor
    tokens: Tensor

    def first(self, bs: int) -> DraftTrees:
        """The trees of the first ``bs`` requests, as views."""
        return DraftTrees(*(array[:bs] for array in self.arrays))

    def cut(self, width: int) -> DraftTrees:
        """The trees of budget ``width - 1``. Nodes stand in the order of a best-first heap, so they are the first."""
        if width == self.parents.shape[1]:
            return self
        parents, depths, ranks, next_token, next_sibling, tokens = (a[:, :width].contiguous() for a in self.arrays)
        next_token, next_sibling = (torch.where(link < width, link, -1) for link in (next_token, next_sibling))
        return DraftTrees(parents, depths, ranks, next_token, next_sibling, tokens)

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.parents, self.depths, self.ranks, self.next_token, self.next_sibling, self.tokens)


def empty_trees(max_bs: int, width: int, device: torch.device | str) -> DraftTrees:
    """Buffers at fixed addresses, for a graph to write. All zero: a tree of roots, harmless as an index."""
    return DraftTrees(*(torch.zeros((max_bs, width), dtype=torch.int64, device=device) for _ in range(6)))


def root_trees(bonus: Tensor) -> DraftTrees:
    """Trees of budget 0: the roots alone. bonus: [bs]."""
    zero = torch.zeros((bonus.shape[0], 1), dtype=torch.int64, device=bonus.device)
    none = zero - 1
    return DraftTrees(zero, zero, none, none, none, bonus.view(-1, 1).long())


def node_count(block_size: int, topk: int, budget: int) -> int:
    """How many nodes besides the root a tree of this budget really has; fewer than ``budget`` where paths run out."""
    paths = 0
    for depth in range(1, block_size):
        paths += topk**depth
        if paths >= budget:
            return budget
    return paths


@triton.jit(do_not_specialize=["bonus_stride", "bs", "levels", "topk", "budget"])
def _grow(  # type: ignore[no-untyped-def]
    logprobs_ptr,
    ids_ptr,
    bonus_ptr,
    parents_ptr,
    depths_ptr,
    ranks_ptr,
    next_token_ptr,
    next_sibling_ptr,
    tokens_ptr,
    bonus_stride,
    bs,
    levels,
    topk,
    budget,
    BLOCK_BS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Every node offers the best child that it has not got yet; the best offer of all is the next node."""
    requests = tl.program_id(0).to(tl.int64) * BLOCK_BS + tl.arange(0, BLOCK_BS)
    live = requests < bs
    lanes = tl.arange(0, BLOCK_W)[None, :]
    none = tl.zeros([BLOCK_BS, BLOCK_W], dtype=tl.int32)
    parents, depths, children, latest = none, none, none, none
    ranks, next_token, next_sibling = none - 1, none - 1, none - 1
    scores = none.to(tl.float64)
    block = requests * levels * topk
    # what is not there, a child below the last depth or behind the last candidate, is minus infinity
    first = tl.load(logprobs_ptr + block, mask=live, other=float("-inf")).to(tl.float64)
    offers = tl.where(lanes == 0, first[:, None], float("-inf"))
    for node in range(1, budget + 1):
        # equal offers: that of the lower parent
        best, parent = tl.max(offers, 1, return_indices=True, return_indices_tie_break_left=True)
        at, new = lanes == parent[:, None], lanes == node
        depth = tl.sum(tl.where(at, depths, 0), 1)
        rank = tl.sum(tl.where(at, children, 0), 1)
        score = tl.sum(tl.where(at, scores, 0.0), 1)
        before = tl.sum(tl.where(at, latest, 0), 1)
        parents = tl.where(new, parent[:, None], parents)
        depths = tl.where(new, depth[:, None] + 1, depths)
        ranks = tl.where(new, rank[:, None], ranks)
        scores = tl.where(new, best[:, None], scores)
        next_token = tl.where(at & (rank == 0)[:, None], node, next_token)
        next_sibling = tl.where((lanes == before[:, None]) & (rank > 0)[:, None], node, next_sibling)
        latest = tl.where(at, node, latest)
        children = tl.where(at, rank[:, None] + 1, children)
        beside, below = live & (rank + 1 < topk), live & (depth + 1 < levels)
        place = block + depth * topk
        sibling = tl.load(logprobs_ptr + place + rank + 1, mask=beside, other=float("-inf")).to(tl.float64)
        child = tl.load(logprobs_ptr + place + topk, mask=below, other=float("-inf")).to(tl.float64)
        offers = tl.where(at, (score + sibling)[:, None], tl.where(new, (best + child)[:, None], offers))
    places = requests[:, None] * (budget + 1) + lanes
    written = live[:, None] & (lanes <= budget)
    chosen = block[:, None] + (depths - 1) * topk + ranks
    tokens = tl.load(ids_ptr + chosen, mask=written & (lanes > 0), other=0)
    bonus = tl.load(bonus_ptr + requests * bonus_stride, mask=live, other=0).to(tl.int64)
    tl.store(tokens_ptr + places, tl.where(lanes == 0, bonus[:, None], tokens), mask=written)
    tl.store(parents_ptr + places, parents.to(tl.int64), mask=written)
    tl.store(depths_ptr + places, depths.to(tl.int64), mask=written)
    tl.store(ranks_ptr + places, ranks.to(tl.int64), mask=written)
    tl.store(next_token_ptr + places, next_token.to(tl.int64), mask=written)
    tl.store(next_sibling_ptr + places, next_sibling.to(tl.int64), mask=written)


def build_trees(logprobs: Tensor, ids: Tensor, bonus: Tensor, budget: int, out: DraftTrees | None = None) -> DraftTrees:
    """The best-first trees of a batch; in ``out``, where that is given: contiguous, of as many requests.

    logprobs: [bs, B - 1, K], entry [b, d, r] of the rank-r candidate at depth d + 1, descending in r. ids: the same
    shape, token ids. bonus: [bs], the roots' tokens. There must be ``budget`` paths (see `node_count`).

    Order of the nodes, and so the tie rule, is that of a best-first heap: higher sum along the path first, then lower
    parent index, then lower rank. Sums are float64, added from the root down.
    """
    bs, levels, topk = logprobs.shape
    trees = out or empty_trees(bs, budget + 1, logprobs.device)
    # a drafter that fails gives trees all the same, which the target does not follow
    safe = torch.nan_to_num(logprobs, nan=FLOOR, neginf=FLOOR).clamp(min=FLOOR, max=0.0)
    _grow[(triton.cdiv(bs, REQUESTS),)](
        *(safe.contiguous(), ids.contiguous(), bonus, *trees.arrays),
        *(bonus.stride(0), bs, levels, topk, budget),
        BLOCK_BS=REQUESTS,
        BLOCK_W=triton.next_power_of_2(budget + 1),
        num_warps=1,
    )
    return trees
