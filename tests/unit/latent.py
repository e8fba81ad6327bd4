"""The arithmetic of a DeepSeek-V3 target, densely, a text at a time: what tests/gpu/kit/kinds writes weights for.

Written from the published model, not from SGLang: latents are expanded to keys and values, nothing is absorbed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


def logits(config: dict[str, Any], weights: Weights, ids: list[int]) -> Tensor:
    """[len(ids), vocabulary]; float32."""
    positions = torch.arange(len(ids))
    x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        x = x + _attention(
            config, weights, f"{at}self_attn.", _norm(config, x, weights[f"{at}input_layernorm.weight"]), positions
        )
        normal = _norm(config, x, weights[f"{at}post_attention_layernorm.weight"])
        dense = i < config["first_k_dense_replace"]
        x = x + (_mlp(weights, f"{at}mlp.", normal) if dense else _experts(config, weights, f"{at}mlp.", normal))
    return _norm(config, x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def greedy(config: dict[str, Any], weights: Weights, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits(config, weights, text)[-1].argmax()))
    return text


def _norm(config: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, config["rms_norm_eps"])


def _attention(config: dict[str, Any], w: Weights, at: str, x: Tensor, positions: Tensor) -> Tensor:
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rank, values = config["kv_lora_rank"], config["v_head_dim"]
    narrow = _norm(config, x @ w[f"{at}q_a_proj.weight"].T, w[f"{at}q_a_layernorm.weight"])
    q = (narrow @ w[f"{at}q_b_proj.weight"].T).view(len(x), heads, nope + rope)
    both = x @ w[f"{at}kv_a_proj_with_mqa.weight"].T
    latents = _norm(config, both[:, :rank], w[f"{at}kv_a_layernorm.weight"])
    kv = (latents @ w[f"{at}kv_b_proj.weight"].T).view(len(x), heads, nope + values)
    q_rotated = rotated(config["rope_theta"], q[..., nope:], positions)
    k_rotated = rotated(config["rope_theta"], both[:, None, rank:], positions)
    scores = torch.einsum("qhd,khd->hqk", q[..., :nope], kv[..., :nope])
    scores = (scores + torch.einsum("qhd,kd->hqk", q_rotated, k_rotated[:, 0])) * (nope + rope) ** -0.5
    later = torch.ones(len(x), len(x)).triu(1).bool()
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, kv[..., nope:]).reshape(len(x), -1) @ w[f"{at}o_proj.weight"].T


def rotated(theta: float, x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of neighbouring pairs on [n, heads, size]."""
    size = x.shape[-1]
    angles = positions.float()[:, None, None] * theta ** -(torch.arange(0, size, 2).float() / size)
    one, two = x[..., ::2], x[..., 1::2]
    turned = (one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin())
    return torch.stack(turned, dim=-1).flatten(-2)


def _mlp(w: Weights, at: str, x: Tensor) -> Tensor:
    gate, up = x @ w[f"{at}gate_proj.weight"].T, x @ w[f"{at}up_proj.weight"].T
    return (F.silu(gate) * up) @ w[f"{at}down_proj.weight"].T


def _experts(config: dict[str, Any], w: Weights, at: str, x: Tensor) -> Tensor:
    scores = (x @ w[f"{at}gate.weight"].T).sigmoid()
    chosen = (scores + w[f"{at}gate.e_score_correction_bias"]).topk(config["num_experts_per_tok"], dim=-1).indices
    shares = scores.gather(1, chosen)
    shares = shares / shares.sum(-1, keepdim=True) * config["routed_scaling_factor"]
    out = _mlp(w, f"{at}shared_experts.", x)
    for expert in range(config["n_routed_experts"]):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        if len(rows):
            out = out.index_add(0, rows, shares[rows, place, None] * _mlp(w, f"{at}experts.{expert}.", x[rows]))
    return out
