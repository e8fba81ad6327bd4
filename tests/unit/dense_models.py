"""The arithmetic of a DeepSeek-V3 and of a Qwen3-MoE, densely, a text at a time: an oracle for their small checkpoints.

Written from the published models, not from SGLang: latents are expanded to keys and values, nothing is absorbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Run:
    """Of one text. logits: [n, vocabulary]. after: the hidden state after each layer, [n, hidden]. kept: of each layer
    what a KV pool keeps: keys and values [n, KV heads, size], or latents with their rotated part [n, 1, size]."""

    logits: Tensor
    after: list[Tensor]
    kept: list[list[Tensor]]


class DenseModel:
    """config, weights: of a checkpoint, by their names there; float32."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self.latent = config["model_type"] == "deepseek_v3"

    def run(self, ids: Sequence[int]) -> Run:
        x, positions = self.weights["model.embed_tokens.weight"][torch.tensor(ids)], torch.arange(len(ids))
        after: list[Tensor] = []
        kept: list[list[Tensor]] = []
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            normal = self._norm(x, f"{at}input_layernorm")
            mixed, keeps = (self._latent if self.latent else self._grouped)(f"{at}self_attn.", normal, positions)
            x = x + mixed
            normal = self._norm(x, f"{at}post_attention_layernorm")
            dense = i < self.config.get("first_k_dense_replace", 0)
            x = x + (self._mlp(f"{at}mlp.", normal) if dense else self._experts(f"{at}mlp.", normal))
            after.append(x)
            kept.append(keeps)
        return Run(self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T, after, kept)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The prompt and ``count`` tokens after it."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.run(text).logits[-1].argmax()))
        return text

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _latent(self, at: str, x: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        config = self.config
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        rank, theta = config["kv_lora_rank"], config["rope_theta"]
        narrow = self._norm(self._times(x, f"{at}q_a_proj"), f"{at}q_a_layernorm")
        q = self._times(narrow, f"{at}q_b_proj").view(len(x), heads, nope + rope)
        both = self._times(x, f"{at}kv_a_proj_with_mqa")
        latents = self._norm(both[:, :rank], f"{at}kv_a_layernorm")
        rotating = rotated_pairs(theta, both[:, None, rank:], positions)
        kv = self._times(latents, f"{at}kv_b_proj").view(len(x), heads, -1)
        q = torch.cat((q[..., :nope], rotated_pairs(theta, q[..., nope:], positions)), -1)
        k = torch.cat((kv[..., :nope], rotating.expand(-1, heads, -1)), -1)
        return self._times(_text(q, k, kv[..., nope:]), f"{at}o_proj"), [torch.cat((latents[:, None], rotating), -1)]

    def _grouped(self, at: str, x: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        config = self.config
        q, k, v = (self._times(x, f"{at}{name}_proj").view(len(x), -1, config["head_dim"]) for name in ("q", "k", "v"))
        q = rotated_halves(config["rope_theta"], self._norm(q, f"{at}q_norm"), positions)
        k = rotated_halves(config["rope_theta"], self._norm(k, f"{at}k_norm"), positions)
        return self._times(_text(q, k, v), f"{at}o_proj"), [k, v]

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        return self._times(F.silu(self._times(x, f"{at}gate_proj")) * self._times(x, f"{at}up_proj"), f"{at}down_proj")

    def _experts(self, at: str, x: Tensor) -> Tensor:
        logits, config = self._times(x, f"{at}gate"), self.config
        if self.latent:
            scores = logits.sigmoid()
            favoured, scale = (
                scores + self.weights[f"{at}gate.e_score_correction_bias"],
                config["routed_scaling_factor"],
            )
        else:
            scores = favoured = logits.softmax(-1)
            scale = 1.0
        chosen = favoured.topk(config["num_experts_per_tok"], dim=-1).indices
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * scale
        out = self._mlp(f"{at}shared_experts.", x) if self.latent else torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, rows, shares[rows, place, None] * self._mlp(f"{at}experts.{expert}.", x[rows]))
        return out


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, cap: float = 0.0) -> Tensor:
    """[n, heads, size of v] in float32. q: [n, heads, D]. k, v: [m, KV heads, D and size of v]. seen: bool [n, m]. cap:
    of the scores, 0 for none."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[-1] ** -0.5
    scores = cap * (scores / cap).tanh() if cap else scores
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def _text(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[n, heads * size of v], each token over itself and those before."""
    return attended(q, k, v, torch.ones(len(q), len(q)).tril().bool()).flatten(1)


def rotated_pairs(theta: float, x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of neighbouring channels on [n, heads, size]."""
    cos, sin = _turns(theta, x.shape[-1], positions)
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1).flatten(-2)


def rotated_halves(theta: float, x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of channels half the size apart on [n, heads, size]."""
    cos, sin = _turns(theta, x.shape[-1], positions)
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def _turns(theta: float, size: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None, None] * theta ** -(torch.arange(0, size, 2).float() / size)
    return angles.cos(), angles.sin()
