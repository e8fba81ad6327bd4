"""The Qwen3 decoder layer, shared by target and drafter (both are stacks of it); rows of all requests in one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import ModelConfig


class Attend(Protocol):
    """Attention over whatever keys the caller keeps: how rows see one another is not the layer's business."""

    def __call__(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        """query [rows, heads, head_dim], own kv [rows, 2 * kv_heads, head_dim] -> [rows, heads * head_dim]."""


class Rotary:
    """RoPE factors in float32 for positions 0..positions-1 (neox halves, as HF Qwen3)."""

    def __init__(self, config: ModelConfig, positions: int) -> None:
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angle = torch.outer(torch.arange(positions, dtype=torch.float32), config.rope_theta**-exponent)
        self._cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
        self._sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [rows, 1, head_dim], at int64 positions [rows]."""
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [rows, heads, head_dim] turned by `rope`; computed in float32, returned in x's dtype."""
    cos, sin = rope
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def _whole(part: Tensor) -> Tensor:
    return part


@dataclass(frozen=True)
class Share:
    """What a rank computes of every layer: the `rank`-th of `of` equal parts of the heads and of the MLP's columns.

    join: [rows, this rank's columns] -> [rows, all ranks' columns, in order of rank]. o_proj and down_proj are whole
    on every rank and multiply what was joined. Split by rows, with an all-reduce after them, they would cost less, but
    each sum would be a sum of partial sums: other roundings than one rank's, and a near tie would go the other way.
    So every sum runs over the same terms as with one rank, and the tokens are the same.
    """

    rank: int = 0
    of: int = 1
    join: Callable[[Tensor], Tensor] = _whole

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Sizes of the part; heads, kv heads and intermediate_size must be multiples of `of`."""
        return replace(
            whole,
            num_heads=whole.num_heads // self.of,
            num_kv_heads=whole.num_kv_heads // self.of,
            intermediate_size=whole.intermediate_size // self.of,
        )

    def rows(self, weight: Tensor) -> Tensor:
        """This part's outputs of a linear weight [out, in]."""
        size = weight.shape[0] // self.of
        return weight[self.rank * size : (self.rank + 1) * size]


WHOLE = Share()


@dataclass(frozen=True)
class Layer:
    """One decoder layer with q, k, v and gate, up fused; linear weights are [out, in].

    config gives the sizes of the part that is computed here; out and down are whole (see Share, whose join this has).
    """

    config: ModelConfig
    join: Callable[[Tensor], Tensor]
    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def forward(self, index: int, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The residual stream [rows, hidden] after this layer."""
        c = self.config
        heads, both = c.num_heads, c.num_heads + c.num_kv_heads
        fused = F.linear(self._norm(x, self.input_norm), self.qkv).view(x.shape[0], -1, c.head_dim)
        qk = rotate(F.rms_norm(fused[:, :both], (c.head_dim,), None, c.rms_norm_eps) * self.qk_norm, rope)
        mixed = self.join(attend(index, qk[:, :heads], torch.cat((qk[:, heads:], fused[:, both:]), dim=1)))
        x = x + F.linear(mixed, self.out)
        gate, up = F.linear(self._norm(x, self.post_norm), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(self.join(F.silu(gate) * up), self.down)

    def context_kv(self, context: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """kv [rows, 2 * kv_heads, head_dim] of DFlash context rows [rows, hidden]: no input norm (dflash layout)."""
        c = self.config
        fused = F.linear(context, self.qkv[c.num_heads * c.head_dim :]).view(context.shape[0], -1, c.head_dim)
        keys = F.rms_norm(fused[:, : c.num_kv_heads], (c.head_dim,), None, c.rms_norm_eps) * self.qk_norm[c.num_heads :]
        return torch.cat((rotate(keys, rope), fused[:, c.num_kv_heads :]), dim=1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)


def build_layers(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str, share: Share = WHOLE) -> list[Layer]:
    """Layers out of checked weights; fuses projections so that a step runs four matrix products a layer."""
    layers, own = [], share.config(config)
    for i in range(config.num_layers):
        w = {name: weights[f"{prefix}layers.{i}.{name}.weight"] for name in _NAMES}
        q_norm, k_norm = w["self_attn.q_norm"], w["self_attn.k_norm"]
        layers.append(
            Layer(
                config=own,
                join=share.join,
                input_norm=w["input_layernorm"],
                qkv=torch.cat([share.rows(w[f"self_attn.{which}_proj"]) for which in "qkv"]),
                qk_norm=torch.stack([q_norm] * own.num_heads + [k_norm] * own.num_kv_heads),
                out=w["self_attn.o_proj"],
                post_norm=w["post_attention_layernorm"],
                gate_up=torch.cat([share.rows(w[f"mlp.{which}_proj"]) for which in ("gate", "up")]),
                down=w["mlp.down_proj"],
            )
        )
    return layers


_NAMES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
