"""Tiny random pairs, and plain float64 implementations of both models to hold the engine against.

The vocabulary is so small that an untrained drafter is right by luck about one time in four: accepted paths then
branch off the first contiguous nodes often enough to test the commit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCABULARY = 16
BLOCK = 5
LAYERS = 4
CAPTURED = (0, 2)
EOS = 0
MASK = 1


def write_pair(root: Path, seed: int = 0, tied: bool = True, heads: tuple[int, int] = (4, 2)) -> Path:
    """`root`/target and `root`/draft with random weights, and a tokenizer that writes token 5 as "t5".

    heads: of queries and of keys, in both models.
    """
    generator = torch.Generator().manual_seed(seed)
    base: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
    }
    target = base | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS,
    }
    draft = base | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(CAPTURED), "block_size": BLOCK},
    }
    tensors = _layers(target, "model.", generator)
    tensors["model.embed_tokens.weight"] = _random(generator, VOCABULARY, 24)
    tensors["model.norm.weight"] = _near_one(generator, 24)
    if not tied:
        tensors["lm_head.weight"] = _random(generator, VOCABULARY, 24)
    heard = _layers(draft, "", generator)
    heard["fc.weight"] = _random(generator, 24, 24 * len(CAPTURED)) / math.sqrt(48)
    heard["hidden_norm.weight"] = _near_one(generator, 24)
    heard["norm.weight"] = _near_one(generator, 24)
    for name, config, weights in (("target", target, tensors), ("draft", draft, heard)):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(config))
        save_file(weights, root / name / "model.safetensors")
    write_tokenizer(root / "target" / "tokenizer.json")
    return root


def write_tokenizer(path: Path) -> None:
    """A word-level tokenizer of the tiny vocabulary; 0 and 1 are special."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {"<eos>": EOS, "<mask>": MASK} | {f"t{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<eos>"), AddedToken("<mask>")])
    tokenizer.save(str(path))


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _near_one(generator: torch.Generator, size: int) -> Tensor:
    return 1 + 0.2 * torch.randn(size, generator=generator)


def _layers(config: dict[str, Any], prefix: str, generator: torch.Generator) -> dict[str, Tensor]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    made: dict[str, Tensor] = {}
    for i in range(config["num_hidden_layers"]):
        p = f"{prefix}layers.{i}."
        for name, out, size in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            made[f"{p}{name}.weight"] = 2 * _random(generator, out, size) / math.sqrt(size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{p}{name}.weight"] = _near_one(generator, hidden)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            made[f"{p}{name}.weight"] = 2 * _near_one(generator, head)
    return made


class Plain:
    """Both models of a pair, written out head by head in float64, without cache, batch or fused weights."""

    def __init__(self, pair: Path) -> None:
        self.config = json.loads((pair / "target" / "config.json").read_text())
        self.draft = json.loads((pair / "draft" / "config.json").read_text())
        self.w = {k: v.double() for k, v in load_file(pair / "target" / "model.safetensors").items()}
        self.d = {k: v.double() for k, v in load_file(pair / "draft" / "model.safetensors").items()}

        self._written: dict[tuple[int, ...], list[int]] = {}

    def target(self, ids: list[int], positions: list[int] | None = None, allowed: Tensor | None = None) -> Tensor:
        """Logits [n, vocab]; causal unless `allowed` [n, n] says otherwise. self.features: [n, captured * hidden]."""
        n = len(ids)
        at = list(range(n)) if positions is None else positions
        seen = torch.ones(n, n).tril().bool() if allowed is None else allowed
        x, kept = self.w["model.embed_tokens.weight"][torch.tensor(ids)], []
        for i in range(self.config["num_hidden_layers"]):
            p = f"model.layers.{i}."
            normed = self._norm(x, self.w[p + "input_layernorm.weight"])
            q, k, v = (self._heads(normed, self.w, p, which, at) for which in "qkv")
            x = self._rest(x, self._attend(q, k, v, seen), self.w, p)
            if i in self.draft["dflash_config"]["target_layer_ids"]:
                kept.append(x)
        self.features = torch.cat(kept, dim=1)
        return self._norm(x, self.w["model.norm.weight"]) @ self._head().T

    def drafted(self, context_features: Tensor, bonus: int) -> Tensor:
        """Logits [block - 1, vocab] of the block after L = len(context_features) tokens."""
        length, block = context_features.shape[0], self.draft["block_size"]
        ids = [bonus] + [self.draft["dflash_config"]["mask_token_id"]] * (block - 1)
        context = self._norm(context_features @ self.d["fc.weight"].T, self.d["hidden_norm.weight"])
        x = self.w["model.embed_tokens.weight"][torch.tensor(ids)]
        before, at = list(range(length)), list(range(length, length + block))
        for i in range(self.draft["num_hidden_layers"]):
            p = f"layers.{i}."
            normed = self._norm(x, self.d[p + "input_layernorm.weight"])
            q, k, v = (self._heads(normed, self.d, p, which, at) for which in "qkv")
            keys, values = (self._heads(context, self.d, p, which, before) for which in "kv")
            every = torch.ones(block, length + block).bool()
            x = self._rest(x, self._attend(q, torch.cat((keys, k)), torch.cat((values, v)), every), self.d, p)
        return self._norm(x[1:], self.d["norm.weight"]) @ self._head().T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The target's own continuation, recomputed from scratch for every token."""
        ids = self._written.setdefault(tuple(prompt), list(prompt))
        while len(ids) < len(prompt) + count:
            ids.append(int(self.target(ids)[-1].argmax()))
        return ids[len(prompt) : len(prompt) + count]

    def _head(self) -> Tensor:
        return self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _heads(self, x: Tensor, w: dict[str, Tensor], p: str, which: str, at: list[int]) -> Tensor:
        size = self.config["head_dim"]
        flat = x @ w[f"{p}self_attn.{which}_proj.weight"].T
        heads = flat.reshape(x.shape[0], -1, size)
        if which == "v":
            return heads
        heads = self._norm(heads, w[f"{p}self_attn.{which}_norm.weight"])
        turned = torch.empty_like(heads)
        for pair in range(size // 2):
            angle = torch.tensor(at, dtype=torch.float64).unsqueeze(1) / self.config["rope_theta"] ** (2 * pair / size)
            a, b = heads[:, :, pair], heads[:, :, pair + size // 2]
            turned[:, :, pair] = a * angle.cos() - b * angle.sin()
            turned[:, :, pair + size // 2] = b * angle.cos() + a * angle.sin()
        return turned

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        outputs = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[2])
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            outputs.append(weights @ v[:, head // group])
        return torch.cat(outputs, dim=1)

    def _rest(self, x: Tensor, mixed: Tensor, w: dict[str, Tensor], p: str) -> Tensor:
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        normed = self._norm(x, w[p + "post_attention_layernorm.weight"])
        gate = normed @ w[p + "mlp.gate_proj.weight"].T
        return (
            x
            + (gate * torch.sigmoid(gate) * (normed @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        )
