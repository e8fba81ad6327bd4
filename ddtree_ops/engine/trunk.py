"""The target's decoder layers and their KV memory, with the three things that a decoder asks of them.

That they may be on several ranks is known here (Trunk is a rank's part) and in `ranks`, nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import PromptAttention, VerifyAttention
from .kv import KVPool
from .layers import Attend, Layer, Rotary


@dataclass(frozen=True)
class PromptRows:
    """Concatenated prompts. positions, slots int64 [rows]: where each row is and its KV goes.

    lengths: rows of each prompt; cached: the slots before them, int64 [columns] of each prompt.
    """

    positions: Tensor
    slots: Tensor
    lengths: list[int]
    cached: list[Tensor]


@dataclass(frozen=True)
class TreeRows:
    """W rows a request. positions int64 [batch * W]; slots of the prefix [batch, P] and of the rows, nodes [batch, W].

    allowed: bool [batch, W, P + W].
    """

    positions: Tensor
    prefix: Tensor
    nodes: Tensor
    allowed: Tensor


class Trunk:
    """All layers on one rank, or one rank's share of each.

    beat_seconds: how often `beat` wants to be called while nothing else is; None: never.
    """

    beat_seconds: float | None = None

    def __init__(self, layers: list[Layer], rotary: Rotary, pool: KVPool) -> None:
        """pool: of the layers' own heads."""
        self._layers, self._rotary, self.pool = layers, rotary, pool

    def prefill(self, x: Tensor, rows: PromptRows, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Embedded prompts x [rows, hidden] through all layers; their KV is stored. What it returns: see verify."""
        attend = PromptAttention(self.pool, rows.slots, rows.lengths, rows.cached)
        return self._forward(x, rows.positions, attend, capture)

    def verify(self, x: Tensor, rows: TreeRows, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Embedded trees x [batch * W, hidden] through all layers; their KV is stored.

        Returns (residual stream after the last layer [rows, hidden], features [rows, len(capture) * hidden] or None).
        Features are the residual stream after each layer of `capture`, concatenated in ascending order.
        """
        config = self._layers[0].config
        heads = (config.num_heads, config.num_kv_heads)
        attend = VerifyAttention(self.pool, heads, rows.prefix, rows.nodes, rows.allowed, x.dtype)
        return self._forward(x, rows.positions, attend, capture)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the KV of slots [n] to slots [n], as KVPool.move."""
        self.pool.move(source, destination)

    def beat(self) -> None:
        """Find out whether every rank is still there."""

    def _forward(
        self, x: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        rope, kept = self._rotary.at(positions), []
        for index, layer in enumerate(self._layers):
            x = layer.forward(index, x, rope, attend)
            if index in capture:
                kept.append(x)
        return x, torch.cat(kept, dim=-1) if capture else None
