"""The pair as it is trained: a Qwen3 target, a DFlash drafter over it, and the files SGLang 0.5.17 loads.

Parameter names are those of the checkpoint, so `state_dict` is the file. Shapes: B rows, S positions, H hidden,
N query heads, K key/value heads, D head size. Written for training: whole sequences, no KV cache.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of target and drafter; `taps` are the target layers (after which) features are taken, ascending."""

    vocab: int = 2048
    hidden: int = 256
    inner: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 6
    draft_layers: int = 3
    block: int = 8
    taps: tuple[int, ...] = (1, 3, 4)
    eps: float = 1e-6
    theta: float = 10000.0
    positions: int = 2048
    eos: int = 0
    mask: int = 1


class Norm(nn.Module):
    """RMS norm computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


def rope_tables(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [..., D] of integer positions [...] (rotate-half layout)."""
    step = torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
    angle = positions.float()[..., None] * shape.theta**-step
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [B, heads, S, D] by tables [B or 1, 1, S, D]."""
    low, high = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head_dim).transpose(1, 2)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, N, S, D]"""
        return rotate(self.q_norm(self._split(self.q_proj(x))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [B, K, S, D]"""
        return rotate(self.k_norm(self._split(self.k_proj(x))), cos, sin), self._split(self.v_proj(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Causal where mask (bool, True = visible, broadcast to [B, N, S, keys]) is None. Returns [B, S, H]."""
        share = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Context(NamedTuple):
    """What a drafter block sees beside itself: features [B, S, H] after hidden_norm, and their RoPE tables."""

    features: Tensor
    cos: Tensor
    sin: Tensor


class Block(nn.Module):
    """One decoder layer, of the target (no context) or of the drafter (context keys come before the block's own)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, context: Context | None = None
    ) -> Tensor:
        inner = self.input_layernorm(x)
        q = self.self_attn.queries(inner, cos, sin)
        k, v = self.self_attn.keys_values(inner, cos, sin)
        if context is not None:
            # DFlash: context features reach k_proj and v_proj as they are, without input_layernorm.
            far_k, far_v = self.self_attn.keys_values(context.features, context.cos, context.sin)
            k, v = torch.cat([far_k, k], 2), torch.cat([far_v, v], 2)
        return self.finish(x, self.self_attn.attend(q, k, v, mask))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after attention's output [B, S, H] and the MLP."""
        x = x + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class Target(nn.Module):
    """Qwen3ForCausalLM with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """ids [B, S] -> (normed last hidden [B, S, H], residual stream after each tap, each [B, S, H]).

        positions [B, S] default to 0..S-1; mask as in Attention.attend.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos, sin = (table[:, None] for table in rope_tables(positions, self.shape))
        x = self.model.embed_tokens(ids)
        taps: list[Tensor] = []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, mask)
            if index in self.shape.taps:
                taps.append(x)
        return self.model.norm(x), taps

    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.model.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


class Drafter(nn.Module):
    """DFlashDraftModel: reads the target's taps, fills a block of masks in one pass."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.draft_layers))
        self.norm = Norm(shape.hidden, shape.eps)

    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    def forward(self, target: Target, taps: list[Tensor], bonus: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, A, block, H] of A blocks a row, to be put through the target's head.

        taps: each [B, S, H] at positions 0..S-1. anchors [B, A]: prefix length L of each block, the position of its
        bonus token (ids [B, A]); the block sees features 0..L-1 and itself. Index i predicts the token at L + i.
        """
        rows, count = anchors.shape
        size, length = self.shape.block, taps[0].shape[1]
        ids = bonus.new_full((rows, count, size), self.shape.mask)
        ids[:, :, 0] = bonus
        x = F.embedding(ids, target.model.embed_tokens.weight).flatten(1, 2)
        positions = (anchors[:, :, None] + torch.arange(size, device=anchors.device)).flatten(1)
        cos, sin = (table[:, None] for table in rope_tables(positions, self.shape))
        features = self.hidden_norm(self.fc(torch.cat(taps, -1)))
        at = torch.arange(length, device=anchors.device)
        far_cos, far_sin = (table[:, None] for table in rope_tables(at[None], self.shape))
        far = (at < anchors[:, :, None])[:, :, None].expand(-1, -1, size, -1).reshape(rows, count * size, length)
        own = torch.arange(count, device=anchors.device).repeat_interleave(size)
        near = (own[:, None] == own).expand(rows, -1, -1)
        mask = torch.cat([far, near], -1)[:, None].expand(-1, self.shape.heads, -1, -1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, Context(features, far_cos, far_sin))
        out: Tensor = self.norm(x).unflatten(1, (count, size))
        return out


def initialise(net: nn.Module, depth: int) -> None:
    """Normal(0, 0.02) everywhere, the two projections into the residual stream divided by sqrt(2 depth)."""
    for name, weight in net.named_parameters():
        if weight.dim() == 2:
            scale = (2 * depth) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=0.02 * scale)


def configs(shape: Shape) -> tuple[dict[str, object], dict[str, object]]:
    """config.json of target and of drafter, in SGLang's keys."""
    common: dict[str, object] = {
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": shape.eos,
        "pad_token_id": shape.eos,
        "use_cache": True,
        "tie_word_embeddings": True,
    }
    target = common | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": shape.layers,
        "max_window_layers": shape.layers,
    }
    draft = common | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": shape.draft_layers,
        "max_window_layers": shape.draft_layers,
        "num_target_layers": shape.layers,
        "block_size": shape.block,
        "layer_types": ["full_attention"] * shape.draft_layers,
        "dflash_config": {
            "mask_token": "<|MASK|>",
            "mask_token_id": shape.mask,
            "target_layer_ids": list(shape.taps),
            "block_size": shape.block,
            "num_target_layers": shape.layers,
        },
    }
    return target, draft


def save(net: nn.Module, config: dict[str, object], directory: Path) -> None:
    """Writes config.json and model.safetensors (bf16)."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in net.state_dict().items()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(net: nn.Module, directory: Path) -> None:
    """Fills `net` with the bf16 weights in float32. Raises on any missing, unknown or misshapen weight."""
    net.load_state_dict({k: v.float() for k, v in load_file(directory / "model.safetensors").items()}, strict=True)
