"""Decoding by steps: prefill of joining prompts, then one draft + verify + commit for all running requests at once.

AR is the verify of a tree that is only its root; the chain is a tree without branches. All three share the code
below, so that what is exact for one is exact for all.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import planted
from .attention import prefix_allowed
from .cache import PrefixCache
from .drafter import Drafter
from .faults import Fault
from .ladder import Rungs
from .mask import ancestors, new_buffer, read_rows, write_rows
from .request import GREEDY, Sampling
from .target import Target
from .tree import Shape, best_first, chain, shape_of
from .trunk import PromptRows, TreeRows, Trunk
from .verify import Verified, take

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Draft:
    """What is drafted. budget None: the chain of block_size - 1; else a tree of `budget` nodes, topk a position.

    rejection: requests that sample verify by rejection and not by a draw a node (see walk). ladder: the budgets by
    batch size, that of one request among them; none: ``budget`` for all.
    """

    budget: int | None
    topk: int
    rejection: bool = False
    ladder: Rungs = ()

    def budget_of(self, requests: int) -> int | None:
        """What holds for a batch of so many."""
        return next((budget for first, budget in reversed(self.ladder) if first <= requests), self.budget)


@dataclass
class Sequence:
    """A request as the decoder sees it: its row of slots, L (tokens with target KV) and the bonus token after them.

    output: every token gained so far, the bonus token last.
    """

    row: int
    length: int = 0
    bonus: int = -1
    sampling: Sampling = GREEDY
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Prompt:
    """A prompt to prefill: logits are wanted from position `logits_from` on.

    steps: whether decode steps follow, this request's or of one that finds the prompt in the cache.
    cached: tokens whose KV the row has from the cache; never more than logits_from.
    """

    sequence: Sequence
    ids: list[int]
    logits_from: int
    steps: bool
    cached: int = 0


@dataclass(frozen=True)
class StepResult:
    """Tokens each request gained, bonus last, and which of the logits [rows, vocab] each of them came from.

    The logits are penalised and tempered as each request asks, not filtered.
    """

    tokens: list[list[int]]
    rows: list[list[int]]
    logits: Tensor


def candidates(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the `count` largest of the last dimension, descending; equal values: lower id first."""
    values, ids = logprobs.topk(min(count + 1, logprobs.shape[-1]))
    if bool((values[..., 1:] == values[..., :-1]).any()):
        # topk breaks ties as it likes; a stable sort costs more and is needed only here.
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], ids[..., :count]


class Decoder:
    """Target, drafter and their memory, stepping a batch of sequences. Not thread-safe."""

    def __init__(
        self,
        target: Target,
        cache: PrefixCache,
        trunk: Trunk,
        drafter: Drafter | None = None,
        draft: Draft | None = None,
        fault: Fault | None = None,
    ) -> None:
        """drafter and draft are both given (DFLASH, DDTREE) or both absent (AR)."""
        if (drafter is None) != (draft is None):
            raise ValueError("drafter and draft go together")
        self.target, self.cache, self.table, self.drafter = target, cache, cache.table, drafter
        self.trunk, self._draft, self.fault = trunk, draft, fault
        self._capture = drafter.config.target_layer_ids if drafter else ()
        self.executed: Shape | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Seq[Prompt]) -> list[Tensor]:
        """One causal pass over what is not cached of the prompts; sets each sequence's length and bonus token.

        Returns the target's own logits [len(ids) - logits_from, vocab] of each prompt. The draft context is filled
        only where steps follow. Raises NumericError.
        """
        counts = [len(prompt.ids) - prompt.cached for prompt in prompts]
        ids = torch.tensor([token for prompt in prompts for token in prompt.ids[prompt.cached :]])
        positions = torch.cat([torch.arange(prompt.cached, len(prompt.ids)) for prompt in prompts])
        rows = torch.tensor([prompt.sequence.row for prompt in prompts])
        slots = self.table.at(torch.repeat_interleave(rows, torch.tensor(counts)), positions)
        cached = [self.table.prefix(rows[i : i + 1], prompt.cached)[0] for i, prompt in enumerate(prompts)]
        going = PromptRows(positions, slots, counts, cached)
        hidden, features = self.trunk.prefill(self.target.embed(ids), going, self._capture)
        if self.drafter is not None and features is not None and any(prompt.steps for prompt in prompts):
            kept = torch.cat([torch.full((n,), prompt.steps) for n, prompt in zip(counts, prompts, strict=True)])
            self.drafter.append(features[kept], slots[kept], positions[kept])
        wanted = torch.cat([torch.arange(p.cached, len(p.ids)) >= p.logits_from for p in prompts])
        sizes = [len(prompt.ids) - prompt.logits_from for prompt in prompts]
        logits = list(torch.split(self.target.logits(hidden[wanted]), sizes))
        for prompt, scores in zip(prompts, logits, strict=True):
            sequence = prompt.sequence
            sequence.length = len(prompt.ids)
            # The last prompt token is the root of a tree of its own; nothing was put out before it.
            root = Verified([0], [0], [prompt.ids[-1]], sequence.length - 1, sequence.sampling, [])
            (first,), _ = take(scores[-1:], [root])
            sequence.bonus = first.tokens[0]
            sequence.output.append(sequence.bonus)
        return logits

    @torch.inference_mode()
    def step(self, sequences: Seq[Sequence]) -> StepResult:
        """Draft, verify and commit once for every sequence. Each gains its accepted tokens and one bonus token.

        The tokens must lie within each sequence's slots: L + W of them. Raises NumericError.
        """
        batch = len(sequences)
        if self.fault is Fault.PADDED_ROWS_WRITE_LIVE_SLOTS:
            pad = replace(sequences[0], bonus=0)
            sequences = [*sequences, *[pad] * planted.padding(batch)]
        rows = torch.tensor([sequence.row for sequence in sequences])
        lengths = torch.tensor([sequence.length for sequence in sequences])
        bonus = torch.tensor([sequence.bonus for sequence in sequences])
        prefix = self.table.prefix(rows, int(lengths.max()))
        parent, depth, token = self._propose(bonus, lengths, prefix)
        width = parent.shape[1]
        nodes = self.table.at(rows, lengths.unsqueeze(1) + torch.arange(width))
        if self.fault is Fault.ROW_SPILL:
            nodes = planted.spilled(self.table, nodes, rows, lengths)
        allowed = self._allowed(parent, depth, lengths, prefix)
        going = TreeRows(self._positions(lengths, depth), prefix, nodes, allowed)
        embedded = self.target.embed(torch.from_numpy(token).reshape(-1))
        hidden, features = self.trunk.verify(embedded, going, self._capture)
        drawn = zip(parent.tolist(), depth.tolist(), token.tolist(), strict=True)
        trees = [
            Verified(*tree, sequence.length, sequence.sampling, sequence.output)
            for sequence, tree in zip(sequences[:batch], drawn, strict=False)
        ]
        rejection = self._draft is not None and self._draft.rejection
        taken, logits = take(self.target.logits(hidden[: batch * width]), trees, rejection, self.fault)
        paths = [t.path for t in taken]
        self._commit(paths, nodes, lengths, features)
        for sequence, t in zip(sequences[:batch], taken, strict=True):
            sequence.length += len(t.path)
            sequence.bonus = t.tokens[-1]
            sequence.output += t.tokens
        self.executed = shape_of(parent, depth, token)
        rows_of = [[i * width + node for node in path] for i, path in enumerate(paths)]
        return StepResult([t.tokens for t in taken], rows_of, logits)

    def _propose(self, bonus: Tensor, lengths: Tensor, prefix: Tensor) -> tuple[Ints, Ints, Ints]:
        """(parent, depth, token), each [batch, W]."""
        batch = bonus.shape[0]
        budget = None if self._draft is None else self._draft.budget_of(batch)
        if self.drafter is None or self._draft is None or budget == 0:
            root = np.zeros((batch, 1), dtype=np.int64)
            return root, root, bonus.unsqueeze(1).numpy()
        logits = self.drafter.logits(bonus, lengths, prefix)
        if budget is None:
            trees = [chain(logits.shape[1])] * batch
            ids = logits.argmax(-1, keepdim=True)
        else:
            values, ids = candidates(torch.log_softmax(logits.float(), dim=-1), min(self._draft.topk, budget))
            if self.fault is Fault.TOPK_IGNORED:
                values = values[..., :1]
            if self.fault is Fault.BUDGET_CLAMPED:
                budget = min(budget, self.drafter.config.block_size - 1)
            trees = [best_first(rows, budget) for rows in values.tolist()]
        depth = np.array([tree.depth for tree in trees], dtype=np.int64)
        rank = np.array([tree.rank for tree in trees], dtype=np.int64)
        if self.fault is Fault.DUPLICATE_SIBLINGS:
            rank = planted.repeat_first(rank)
        if self.fault is Fault.RANK_LOCAL_DRAFT_IDS:
            ids = ids % (logits.shape[-1] // 2)
        token = ids.numpy()[np.arange(batch)[:, None], depth - 1, rank]
        token[:, 0] = bonus.numpy()
        return np.array([tree.parent for tree in trees], dtype=np.int64), depth, token

    def _positions(self, lengths: Tensor, depth: Ints) -> Tensor:
        offset = torch.from_numpy(depth)
        if self.fault is Fault.ROPE_BY_INDEX:
            offset = torch.arange(depth.shape[1])
        return (lengths.unsqueeze(1) + offset).reshape(-1)

    def _allowed(self, parent: Ints, depth: Ints, lengths: Tensor, prefix: Tensor) -> Tensor:
        """bool [batch, W, prefix columns + W]: the own prefix, and the tree cells as read back from the flat buffer."""
        batch, width = parent.shape
        stride = width
        if self.fault is Fault.MASK_ROWS_BY_BLOCK_SIZE and self.drafter is not None:
            stride = self.drafter.config.block_size
        buffer = new_buffer(batch, width, stride)
        write_rows(buffer, ancestors(parent, int(depth.max())), stride)
        cells = torch.from_numpy(read_rows(buffer, batch, width))
        if self.fault is Fault.MASK_OF_FIRST_REQUEST:
            cells = cells[:1].expand(batch, -1, -1)
        if self.fault is Fault.MASK_ALL_BLOCKED:
            cells = torch.zeros_like(cells)
        visible = prefix_allowed(lengths, prefix.shape[1]).unsqueeze(1).expand(batch, width, -1)
        return torch.cat((visible, cells), dim=2)

    def _commit(self, paths: list[list[int]], nodes: Tensor, lengths: Tensor, features: Tensor | None) -> None:
        """Compact each accepted path to the slots that follow its prefix, and hand its features to the drafter."""
        request = torch.tensor([i for i, path in enumerate(paths) for _ in path])
        node = torch.tensor([node for path in paths for node in path])
        order = torch.tensor([place for path in paths for place in range(len(path))])
        source, destination = nodes[request, node], nodes[request, order]
        moved = source != destination
        if bool(moved.any()) and self.fault is not Fault.STALE_KV:
            self.trunk.move(source[moved], destination[moved])
        if self.fault is Fault.DRAFT_HIDDEN_OF_WRONG_NODE:
            node = order
        if self.drafter is not None and features is not None:
            self.drafter.append(features[request * nodes.shape[1] + node], destination, lengths[request] + order)
