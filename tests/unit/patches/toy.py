"""A target small enough for Triton's interpreter: two layers of attention, random weights, its own dense oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 2, 2, 1, 16, 32, 23

FLAT = 0.04
"""Of the logits, so that some tokens are within half a nat of the best."""

#: (layer, q [n, HEADS, HEAD_DIM], k, v [n, KV_HEADS, HEAD_DIM]) -> [n, HEADS * HEAD_DIM]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Of its attention as a backend is told of it. keys, values: sizes of a head; scale: of the scores."""

    heads: int
    kv_heads: int
    keys: int
    values: int
    scale: float


@dataclass(frozen=True)
class Rows:
    """logits [n, VOCABULARY]; features [n, LAYERS * HIDDEN], what a drafter is fed."""

    logits: Tensor
    features: Tensor


class Toy:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * columns**-0.5

        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.layers = [
            ([2.0 * weight(size, HIDDEN) for size in sizes], 2.0 * weight(HIDDEN, HEADS * HEAD_DIM))
            for _ in range(LAYERS)
        ]

    @property
    def shape(self) -> Shape:
        return Shape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Rows:
        """tokens, positions: [n]."""

        def layer(number: int, normal: Tensor, inwards: list[Tensor]) -> Tensor:
            q, k, v = ((normal @ w.T).view(len(tokens), -1, HEAD_DIM) for w in inwards)
            return attend(number, rotated(q, positions), rotated(k, positions), v)

        return self._rows(tokens, layer)

    def _rows(self, tokens: Tensor, layer: Callable[[int, Tensor, list[Tensor]], Tensor]) -> Rows:
        x = self.embedding[tokens]
        features = []
        for number, (inwards, outwards) in enumerate(self.layers):
            normal = x / x.norm(dim=-1, keepdim=True) * HIDDEN**0.5
            x = x + layer(number, normal, inwards) @ outwards.T
            features.append(x)
        return Rows(FLAT * (x @ self.embedding.T), torch.cat(features, dim=1))

    def dense(self, tokens: list[int]) -> Rows:
        """Every position of one text, causally."""
        return self._dense(tokens, [])

    def kept(self, tokens: list[int]) -> list[list[Tensor]]:
        """What is kept of a text: of each layer its keys and its values, [n, KV_HEADS, HEAD_DIM]."""
        found: list[Tensor] = []
        self._dense(tokens, found)
        return [found[2 * layer : 2 * layer + 2] for layer in range(LAYERS)]

    def _dense(self, tokens: list[int], found: list[Tensor]) -> Rows:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.extend((k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k.expand(-1, HEADS, -1)) * HEAD_DIM**-0.5
            later = torch.ones(len(tokens), len(tokens)).triu(1).bool()
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v.expand(-1, HEADS, -1)).reshape(len(tokens), -1)

        return self.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The prompt and ``count`` tokens after it."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.dense(text).logits[-1].argmax()))
        return text


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on [n, heads, size]."""
    half = x.shape[-1] // 2
    angles = positions.float()[:, None] * 100.0 ** -(torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
