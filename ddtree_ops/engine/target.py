"""The Qwen3 target model: embeddings, layers, head, and the residual stream at the layers a drafter listens to."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import ModelConfig
from .layers import Attend, Rotary, build_layers
from .weights import load_weights, target_shapes


class Target:
    """A loaded target; `positions` bounds the RoPE positions it can be run at."""

    def __init__(self, directory: Path, config: ModelConfig, dtype: torch.dtype, positions: int) -> None:
        """Raises ConfigError when the weights are not exactly the configuration's."""
        weights = load_weights(directory, target_shapes(config), dtype)
        self.config = config
        self.dtype = dtype
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = self._embedding if config.tied_embeddings else weights["lm_head.weight"]
        self._norm = weights["model.norm.weight"]
        self._layers = build_layers(config, weights, "model.")
        self._rotary = Rotary(config, positions)

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows [rows, hidden] of int64 ids [rows]."""
        return self._embedding.index_select(0, ids)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """(residual stream after the last layer [rows, hidden], features [rows, len(capture) * hidden] or None).

        Features are the residual stream after each layer of `capture`, concatenated in ascending order.
        """
        x, rope, kept = self.embed(ids), self._rotary.at(positions), []
        for index, layer in enumerate(self._layers):
            x = layer.forward(index, x, rope, attend)
            if index in capture:
                kept.append(x)
        return x, torch.cat(kept, dim=-1) if capture else None

    def logits(self, x: Tensor) -> Tensor:
        """Logits [rows, vocab] of the residual stream [rows, hidden], final norm included."""
        return self.head(F.rms_norm(x, (self.config.hidden_size,), self._norm, self.config.rms_norm_eps))

    def head(self, normed: Tensor) -> Tensor:
        """Logits [rows, vocab] of rows that are normed already (the drafter norms with its own weight)."""
        return F.linear(normed, self._head)
