"""What planted faults compute instead of the right thing. Nothing here runs unless --fault asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .faults import Fault
from .kv import SlotTable
from .request import GREEDY, Sampling
from .walk import accepted_path

if TYPE_CHECKING:
    from .verify import Verified

_LENIENCE = 0.5
"""Nats below the argmax at which lenient acceptance still accepts."""


def parameters(fault: Fault | None, asked: Sequence[Sampling]) -> list[Sampling]:
    """The sampling parameters that each request of a batch is verified with."""
    if fault is Fault.TEMPERATURE_IGNORED:
        return [replace(s, temperature=0.0) for s in asked]
    if fault is Fault.MIN_P_IGNORED:
        return [replace(s, min_p=0.0) for s in asked]
    if fault is Fault.PARAMETERS_OF_NEIGHBOUR:
        return [*asked[1:], asked[0]]
    if fault is Fault.GREEDY_ROWS_SAMPLED and not all(s.greedy for s in asked):
        return [replace(GREEDY, temperature=1.0, seed=s.seed) if s.greedy else s for s in asked]
    return list(asked)


def logits(fault: Fault | None, given: Tensor, batch: int) -> Tensor:
    """The logits [batch * W, vocab] as the walk reads them."""
    if fault is not Fault.LOGITS_OF_ANOTHER or batch < 8:
        return given
    width = given.shape[0] // batch
    return torch.cat((given[:-width], given[:width]))


def top_k_before_top_p(filtered: Tensor, sampling: Sampling) -> Tensor:
    """Weights [n, vocab] of top_k alone, cut again by top_p on their own mass."""
    ranked, ids = (filtered / filtered.sum(dim=-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
    keep = ranked.cumsum(dim=-1) - ranked <= sampling.top_p
    return torch.zeros_like(ranked).scatter_(1, ids, ranked * keep)


def rank_local(ids: Sequence[int], vocab: int) -> list[int]:
    """Ids as the rank knows them that holds their half of the vocabulary."""
    half = vocab // 2
    return [i - half if i >= half else i for i in ids]


def walk(fault: Fault, tree: Verified, choice: list[int], scores: Tensor) -> tuple[list[int], list[int]]:
    """(path, tokens) of a walk with a fault; scores [W, vocab] are the logits behind `choice`."""
    parent, token = tree.parent, tree.token
    if fault is Fault.RANK_LOCAL_IDS:
        choice = rank_local(choice, scores.shape[1])
    path = accepted_path(parent, token, choice)
    if fault is Fault.LENIENT_ACCEPTANCE:
        path = _lenient(parent, token, choice, scores.float().log_softmax(dim=-1))
    elif fault is Fault.WALK_PAST_MISMATCH:
        path = _past_mismatch(parent, token, choice)
    elif fault is Fault.PAD_NODE_ACCEPTED and path[-1] != len(parent) - 1:
        path.append(len(parent) - 1)
    tokens = [*(token[node] for node in path[1:]), choice[path[-1]]]
    if fault is Fault.BONUS_FROM_PARENT and len(path) > 1:
        tokens[-1] = choice[path[-2]]
    return path, tokens


def _lenient(parent: list[int], token: list[int], choice: list[int], scores: Tensor) -> list[int]:
    path = [0]
    while True:
        row, best = scores[path[-1]], choice[path[-1]]
        near = [
            node
            for node in range(1, len(parent))
            if parent[node] == path[-1] and row[token[node]] >= row[best] - _LENIENCE
        ]
        if not near:
            return path
        path.append(next((node for node in near if token[node] == best), near[0]))


def _past_mismatch(parent: list[int], token: list[int], choice: list[int]) -> list[int]:
    path = accepted_path(parent, token, choice)
    below = [node for node in range(1, len(parent)) if parent[node] == path[-1]]
    for child in below:
        further = [node for node in range(1, len(parent)) if parent[node] == child and token[node] == choice[child]]
        if further:
            return [*path, child, further[0]]
    return path


def repeat_first(rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Candidate ranks [batch, W] in which the second repeats the first and the others follow one late."""
    return np.where(rank > 0, rank - 1, rank)


def spilled(table: SlotTable, nodes: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Slots [batch, W] of a verify, those at or beyond the context limit replaced by the next request's first ones."""
    width = nodes.shape[1]
    beyond = lengths.unsqueeze(1) + torch.arange(width) - (table.columns - width)
    if len(rows) == 1:
        return nodes
    return torch.where(beyond >= 0, table.at(rows.roll(-1), beyond.clamp(min=0)), nodes)


def padding(batch: int) -> int:
    """Rows that fill a batch up to the next power of two."""
    size = 1
    while size < batch:
        size *= 2
    return size - batch
