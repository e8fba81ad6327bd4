"""The Qwen3 decoder layer, shared by target and drafter (both are stacks of it); rows of all requests in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layer:
    """One decoder layer with q, k, v and gate, up fused; linear weights are [out, in]."""

    config: ModelConfig
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
        mixed = attend(index, qk[:, :heads], torch.cat((qk[:, heads:], fused[:, both:]), dim=1))
        x = x + F.linear(mixed, self.out)
        gate, up = F.linear(self._norm(x, self.post_norm), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def context_kv(self, context: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """kv [rows, 2 * kv_heads, head_dim] of DFlash context rows [rows, hidden]: no input norm (dflash layout)."""
        c = self.config
        fused = F.linear(context, self.qkv[c.num_heads * c.head_dim :]).view(context.shape[0], -1, c.head_dim)
        keys = F.rms_norm(fused[:, : c.num_kv_heads], (c.head_dim,), None, c.rms_norm_eps) * self.qk_norm[c.num_heads :]
        return torch.cat((rotate(keys, rope), fused[:, c.num_kv_heads :]), dim=1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)


def build_layers(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> list[Layer]:
    """Layers out of checked weights; fuses projections so that a step runs four matrix products a layer."""
    layers = []
    for i in range(config.num_layers):
        w = {name: weights[f"{prefix}layers.{i}.{name}.weight"] for name in _NAMES}
        q_norm, k_norm = w["self_attn.q_norm"], w["self_attn.k_norm"]
        layers.append(
            Layer(
                config=config,
                input_norm=w["input_layernorm"],
                qkv=torch.cat((w["self_attn.q_proj"], w["self_attn.k_proj"], w["self_attn.v_proj"])),
                qk_norm=torch.stack([q_norm] * config.num_heads + [k_norm] * config.num_kv_heads),
                out=w["self_attn.o_proj"],
                post_norm=w["post_attention_layernorm"],
                gate_up=torch.cat((w["mlp.gate_proj"], w["mlp.up_proj"])),
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
