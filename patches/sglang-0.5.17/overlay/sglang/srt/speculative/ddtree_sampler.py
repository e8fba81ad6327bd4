"""DDTREE: candidates and trees from the drafter's hidden states, inside the draft's CUDA graph.

DFLASH's sampler takes the argmax of every drafted position there; this one takes the best K with their
log-probabilities and builds the trees, so that the whole draft, the shape of the tree included, is one replay.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree_build import DraftTrees, build_trees, empty_trees
from sglang.srt.speculative.ddtree_candidates import merge_shards, top_logprobs
from torch import Tensor

CHUNK_BYTES = 512 << 20
"""Of logits at once. Every chunk of rows reads the whole head again."""


class DDTreeDraftSampler:
    """Trees over the target's head, which the drafter borrows. Callable as a capture-tail hook of the draft's graph.

    Tensor parallel: each rank takes the best K of its vocabulary shard with global ids and its own sum of exponentials;
    all ranks gather them and choose from the same numbers, so they build the same tree.
    """

    def __init__(
        self,
        *,
        weight: Tensor,
        block_size: int,
        budget: int,
        topk: int,
        num_org: int,
        org_vocab_start: int,
        max_bs: int,
        tp_group: Any = None,
    ) -> None:
        """weight: the head's rows of this rank, the first ``num_org`` of them real, which may be fewer than ``topk`` or
        none: the last ranks of an odd vocabulary have what is left. tp_group None: one rank.
        """
        self._weight = weight[:num_org]
        self._start = org_vocab_start
        self._block_size, self._budget, self._topk = block_size, budget, topk
        self._tp_group = tp_group
        self._trees = empty_trees(max_bs, budget + 1, weight.device)

    def __call__(self, hidden_states: Tensor, input_ids: Tensor) -> None:
        """hidden_states: [bs * B, hidden] of the draft. input_ids: [bs * B]; a block's first is the bonus token."""
        blocks = input_ids.view(-1, self._block_size)
        self.draw(hidden_states, blocks[:, 0], out=self._trees.first(blocks.shape[0]))

    def captured(self, bs: int) -> DraftTrees:
        """What the last replay left for the first ``bs`` requests: views, valid until the next draft."""
        return self._trees.first(bs)

    def draw(self, hidden_states: Tensor, bonus: Tensor, out: DraftTrees | None = None) -> DraftTrees:
        """The trees of one draft, in ``out`` where that is given. bonus: [bs]."""
        bs, drafted = bonus.shape[0], self._block_size - 1
        hidden = hidden_states.view(bs, self._block_size, -1)[:, 1:].reshape(bs * drafted, -1).to(self._weight.dtype)
        logprobs, ids = self._candidates(hidden)
        shape = (bs, drafted, self._topk)
        return build_trees(logprobs.view(shape), ids.view(shape), bonus, self._budget, out)

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probabilities, token ids), each [rows, K]."""
        row_bytes = max(1, self._weight.shape[0] * self._weight.element_size())
        chunks = torch.split(hidden, max(1, CHUNK_BYTES // row_bytes))
        parts = [top_logprobs(torch.matmul(chunk, self._weight.T), self._topk) for chunk in chunks]
        values, ids, totals = (torch.cat(part) for part in zip(*parts, strict=True))
        ids = ids + self._start
        if self._tp_group is None:
            return values - totals.unsqueeze(1), ids
        return merge_shards(self._gather(values), self._gather(ids), self._gather(totals), self._topk)

    def _gather(self, mine: Tensor) -> Tensor:
        """[ranks, *shape] in rank order."""
        everyone = mine.new_empty((self._tp_group.world_size * mine.shape[0], *mine.shape[1:]))
        self._tp_group.all_gather_into_tensor(everyone, mine.contiguous())
        return everyone.view(self._tp_group.world_size, *mine.shape)
