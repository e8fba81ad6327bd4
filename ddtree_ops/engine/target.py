"""The Qwen3 target model around its layers: embeddings, final norm and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import ModelConfig


class Target:
    """What of a target is on rank 0 alone; its layers are a Trunk."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """weights: checked ones, of target_shapes(config)."""
        self.config = config
        self.dtype = dtype
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = self._embedding if config.tied_embeddings else weights["lm_head.weight"]
        self._norm = weights["model.norm.weight"]

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows [rows, hidden] of int64 ids [rows]."""
        return self._embedding.index_select(0, ids)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [rows, vocab] of the residual stream [rows, hidden], final norm included."""
        return self.head(F.rms_norm(x, (self.config.hidden_size,), self._norm, self.config.rms_norm_eps))

    def head(self, normed: Tensor) -> Tensor:
        """Logits [rows, vocab] of rows that are normed already (the drafter norms with its own weight)."""
        return F.linear(normed, self._head)
