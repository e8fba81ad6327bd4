"""The DFlash drafter: one pass predicts a whole block from the target's hidden states (layout of SGLang 0.5.17).

Its context is the target's features of tokens 0..L-1, kept as KV under the same slots as the target's. A block is
[bonus, mask, ...] at RoPE positions L..L+B-1; the output at block index i predicts the token at L+i, index 0 none.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import BlockAttention
from .config import DraftConfig
from .kv import KVPool
from .layers import Rotary, build_layers
from .target import Target
from .weights import draft_shapes, load_weights


class Drafter:
    """A loaded drafter with its own KV pool."""

    def __init__(self, directory: Path, config: DraftConfig, target: Target, slots: int, positions: int) -> None:
        """Raises ConfigError when the weights are not exactly the configuration's."""
        shapes = draft_shapes(config.model, len(config.target_layer_ids))
        weights = load_weights(directory, shapes, target.dtype)
        self.config = config
        self._target = target
        self._fc = weights["fc.weight"]
        self._hidden_norm = weights["hidden_norm.weight"]
        self._norm = weights["norm.weight"]
        self._layers = build_layers(config.model, weights, "")
        self._rotary = Rotary(config.model, positions)
        self._pool = KVPool(config.model, slots, target.dtype)

    def append(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Add committed tokens' target features [rows, layers * hidden] to the context, at slots, positions [rows]."""
        context = self._rms(F.linear(features, self._fc), self._hidden_norm)
        rope = self._rotary.at(positions)
        for index, layer in enumerate(self._layers):
            self._pool.write(index, slots, layer.context_kv(context, rope))

    def logits(self, bonus: Tensor, lengths: Tensor, context: Tensor) -> Tensor:
        """Logits [batch, B - 1, vocab] for the tokens at L+1..L+B-1.

        bonus int64 [batch] is the token at position L = lengths [batch]; context [batch, P] its prefix slots.
        """
        block, model, batch = self.config.block_size, self.config.model, bonus.shape[0]
        ids = torch.full((batch, block), self.config.mask_token_id)
        ids[:, 0] = bonus
        positions = (lengths.unsqueeze(1) + torch.arange(block)).reshape(-1)
        attend = BlockAttention(self._pool, (model.num_heads, model.num_kv_heads), context, lengths, block)
        x, rope = self._target.embed(ids.reshape(-1)), self._rotary.at(positions)
        for index, layer in enumerate(self._layers):
            x = layer.forward(index, x, rope, attend)
        drafted = x.view(batch, block, -1)[:, 1:]
        return self._target.head(self._rms(drafted, self._norm))

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.model.hidden_size,), weight, self.config.model.rms_norm_eps)
