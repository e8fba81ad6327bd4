"""The toy target with latent attention (MLA), as DeepSeek-V3 has it: one rotated key and one latent a token.

Served, queries are turned into the latents' space and the latents are keys and values of one KV head; the oracle
expands them to keys and values of every head instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .toy import HEADS, HIDDEN, LAYERS, VOCABULARY, Attend, Rows, Shape, Toy, rotated

NOPE, ROPE, VALUE = 16, 32, 16
RANK = 256
"""With ROPE a size that the kernel splits in two, as it does Kimi's 512 and 64."""


class LatentToy(Toy):
    """Kept of a token: [RANK + ROPE] a layer."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * columns**-0.5

        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        sizes = (HEADS * (NOPE + ROPE), RANK + ROPE)
        self.layers = [
            ([2.0 * weight(size, HIDDEN) for size in sizes], 2.0 * weight(HIDDEN, HEADS * VALUE)) for _ in range(LAYERS)
        ]
        self.expanding = [weight(HEADS * (NOPE + VALUE), RANK).view(HEADS, NOPE + VALUE, RANK) for _ in range(LAYERS)]

    @property
    def shape(self) -> Shape:
        return Shape(HEADS, 1, RANK + ROPE, RANK, (NOPE + ROPE) ** -0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Rows:
        def absorbed(layer: int, q: Tensor, kept: Tensor) -> Tensor:
            expand = self.expanding[layer]
            turned = torch.einsum("nhd,hdr->nhr", q[..., :NOPE], expand[:, :NOPE])
            out = attend(layer, torch.cat((turned, q[..., NOPE:]), -1), kept[:, None], kept[:, None, :RANK])
            return torch.einsum("nhr,hdr->nhd", out.view(-1, HEADS, RANK), expand[:, NOPE:]).flatten(1)

        return self._run(tokens, positions, absorbed)

    def dense(self, tokens: list[int]) -> Rows:
        return self._dense(tokens, [])

    def kept(self, tokens: list[int]) -> list[list[Tensor]]:
        found: list[Tensor] = []
        self._dense(tokens, found)
        return [[layer[:, None]] for layer in found]

    def _dense(self, tokens: list[int], found: list[Tensor]) -> Rows:
        later = torch.ones(len(tokens), len(tokens)).triu(1).bool()

        def expanded(layer: int, q: Tensor, kept: Tensor) -> Tensor:
            found.append(kept)
            both = torch.einsum("nr,hdr->nhd", kept[:, :RANK], self.expanding[layer])
            rotating = kept[:, None, RANK:].expand(-1, HEADS, -1)
            keys = torch.cat((both[..., :NOPE], rotating), -1)
            scores = torch.einsum("qhd,khd->hqk", q, keys) * self.shape.scale
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, both[..., NOPE:]).flatten(1)

        return self._run(torch.tensor(tokens), torch.arange(len(tokens)), expanded)

    def _run(self, tokens: Tensor, positions: Tensor, attention: object) -> Rows:
        """attention: (layer, q [n, HEADS, NOPE + ROPE], kept [n, RANK + ROPE]) -> [n, HEADS * VALUE]."""
        assert callable(attention)

        def layer(number: int, normal: Tensor, inwards: list[Tensor]) -> Tensor:
            q = (normal @ inwards[0].T).view(len(tokens), HEADS, -1)
            q = torch.cat((q[..., :NOPE], rotated(q[..., NOPE:], positions)), -1)
            both = normal @ inwards[1].T
            latents = both[:, :RANK] / both[:, :RANK].norm(dim=-1, keepdim=True) * RANK**0.5
            kept = torch.cat((latents, rotated(both[:, None, RANK:], positions)[:, 0]), -1)
            out: Tensor = attention(number, q, kept)
            return out

        return self._rows(tokens, layer)
