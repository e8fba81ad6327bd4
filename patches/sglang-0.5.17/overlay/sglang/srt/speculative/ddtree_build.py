"""DDTREE: from the drafter's log-probabilities to trees, for a whole batch, in operations that a CUDA graph can hold.

A DFlash drafter predicts every position independently of the others, so the log-probability of a path is the sum of
one entry a position (DDTree, arXiv 2604.12989). The tree is the ``budget`` most probable prefixes. Because log p <= 0 a
node never comes before its parent, hence parent index < child index: the Triton kernel's causal clip relies on it.

Everything here has static shapes: W = budget + 1 nodes a request, node 0 the root, which is the last token of the text
(the bonus token of the step before).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = -1e30
"""Log-probability of what has none. Finite, so that sums over a path still compare."""


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

    def copy_(self, other: DraftTrees) -> None:
        """Overwrite these arrays in place."""
        for mine, theirs in zip(self.arrays, other.arrays, strict=True):
            mine.copy_(theirs)

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


def build_trees(logprobs: Tensor, ids: Tensor, bonus: Tensor, budget: int) -> DraftTrees:
    """The best-first trees of a batch.

    logprobs: [bs, B - 1, K], entry [b, d, r] of the rank-r candidate at depth d + 1, descending in r. ids: the same
    shape, token ids. bonus: [bs], the roots' tokens. There must be ``budget`` paths (see `node_count`).

    Order of the nodes, and so the tie rule, is that of a best-first heap: higher sum along the path first, then lower
    parent index, then lower rank. Sums are float64, added from the root down.

    How: if the first ``budget`` nodes of depth < t are known in order, so are those of depth <= t, for whatever is
    cut off comes behind ``budget`` others, its children too, and the order among nodes of depth < t does not change
    when deeper ones join. A row-major table [node, rank] of all children has its ties in the rule's order already, so
    one stable sort by score makes the next list. One more round than there are depths turns the parents' places in the
    last list into indices of the final one.
    """
    bs, levels, topk = logprobs.shape
    safe = torch.nan_to_num(logprobs.double(), nan=FLOOR, neginf=FLOOR).clamp(min=FLOOR, max=0.0)
    # the children of a node at the last depth do not exist
    rows = torch.nn.functional.pad(safe, (0, 0, 0, 1), value=float("-inf"))
    root = torch.zeros((bs, 1), dtype=torch.int64, device=logprobs.device)
    scores = torch.full((bs, budget + 1), float("-inf"), dtype=torch.float64, device=logprobs.device)
    scores[:, 0] = 0.0
    depths = torch.zeros((bs, budget + 1), dtype=torch.int64, device=logprobs.device)
    place = depths[:, 1:]
    for _ in range(min(levels, budget) + 1):
        table = scores.unsqueeze(2) + rows.gather(1, depths.unsqueeze(2).expand(-1, -1, topk))
        best, order = table.flatten(1).sort(dim=1, descending=True, stable=True)
        place = order[:, :budget]
        scores = torch.cat((scores[:, :1], best[:, :budget]), dim=1)
        below = depths.gather(1, place // topk) + 1
        depths = torch.cat((root, below.clamp(max=levels)), dim=1)
    parent, rank = place // topk, place % topk
    chosen = (depths[:, 1:] - 1) * topk + rank
    tokens = torch.cat((bonus.view(-1, 1), ids.reshape(bs, -1).gather(1, chosen)), dim=1)
    next_token, next_sibling = _links(place, rank, topk, budget)
    return DraftTrees(
        parents=torch.cat((root, parent), dim=1),
        depths=depths,
        ranks=torch.cat((root - 1, rank), dim=1),
        next_token=next_token,
        next_sibling=next_sibling,
        tokens=tokens,
    )


def _links(place: Tensor, rank: Tensor, topk: int, budget: int) -> tuple[Tensor, Tensor]:
    """(next_token, next_sibling) from each node's place [bs, budget] in the row-major table [node, rank].

    A node of rank r > 0 has all lower ranks of its parent before it, so its siblings are neighbours in the table.
    """
    bs = place.shape[0]
    at = torch.full((bs, (budget + 1) * topk + 1), -1, dtype=torch.int64, device=place.device)
    nodes = torch.arange(1, budget + 1, device=place.device).expand(bs, -1)
    at.scatter_(1, place, nodes)
    next_token = at[:, : (budget + 1) * topk : topk].contiguous()
    sibling = torch.where(rank + 1 < topk, at.gather(1, place + 1), -1)
    alone = torch.full((bs, 1), -1, dtype=torch.int64, device=place.device)
    return next_token, torch.cat((alone, sibling), dim=1)


def top_logprobs(logits: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, ids, log of the sum of exponentials) of the ``topk`` best of each row: [n, K] float32, [n, K], [n].

    logits: [n, vocabulary], any floating type. Equal values: lower id first; which of several equal values at the edge
    of the ``topk`` are kept is the kernel's choice, the same on all ranks. One candidate is argmax's, as the chain's.
    A vocabulary of fewer than ``topk`` (a shard's) gives as many, or none.
    """
    there = min(topk, logits.shape[-1])
    if there == 1:
        values, ids = logits.max(dim=-1, keepdim=True)
    else:
        values, ids = logits.topk(there, dim=-1)
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return values.float(), ids, torch.logsumexp(logits.float(), dim=-1)


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
