"""Checkpoints of other kinds of target than the tiny pair's, with drafters that are good for something.

    python -m tests.gpu.kit.kinds OUT        (needs torch and safetensors; writes a folder a kind, 100 MB)

``moe``: the tiny pair with experts. Every expert of a layer is the pair's own MLP and a token's router weights add up
to one, so the text is the pair's, whichever experts are asked, and the pair's trained drafter stays as good as it is.

``mla``, and ``kimi`` with Kimi K2's own sizes of latents and heads: layers of the DeepSeek-V3 kind (latent attention, a
dense layer, then layers with routed experts, a shared one and a correction bias), all of them random. The pair cannot
be written as one: its keys are normalised head by head and rotated in each KV head by itself, where MLA has one rotated
part for all heads. A random target has no drafter, so half of its text is made easy to guess: a token is a group and a
member of it. The next token's group follows from this one's by a fixed permutation, which stands in channels of the
hidden state that no layer writes; which of the MEMBERS tokens of that group comes is up to the random layers, so to all
of the text before. The drafter knows the permutation, and nothing of the rest: in one layer, head h of a mask token
attends to the place h before its own, and what it finds there is the group of the block's first token or nothing. So a
tree has several children of one node that are about as likely, and attention alone decides which of them is accepted.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PAIR = Path(__file__).parents[3] / "ddtree_ops" / "engine" / "pair"
EXPERTS, ASKED = 8, 3
"""Of a layer, and of them a token's."""

GROUPS, MEMBERS = 127, 4
RESERVED, END, MASK = 4, 0, 1
"""The first tokens are in no group and in no text: that which ends one, and the drafter's mask token, as the pair's
tokenizer has them."""
VOCABULARY = RESERVED + GROUPS * MEMBERS
HIDDEN = 256
CONSTANT, MASKED = GROUPS, GROUPS + 1
"""Channels: 1 in every token's embedding, and 1 in the mask token's alone."""
CONTENT = GROUPS + 2
"""The first of the channels that layers write."""
BLOCK, DRAFT_HEADS, DRAFT_HEAD_DIM = 8, 8, 128
SHARPNESS = 10.0
"""Weight of the drafter's query and key norms: the scores of two neighbouring places are then far apart."""
POSITIONS, THETA = 2048, 10000.0


def experts_of_pair(pair: Path, out: Path) -> None:
    """``out/target`` is the pair's target as a Qwen3-MoE, ``out/draft`` the pair's own."""
    shutil.copytree(pair, out, ignore=shutil.ignore_patterns("model.safetensors"))
    shutil.copy(pair / "draft" / "model.safetensors", out / "draft")
    config = json.loads((pair / "target" / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": ASKED,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    }
    generator = torch.Generator().manual_seed(7)
    made: dict[str, Tensor] = {}
    for name, tensor in load_file(pair / "target" / "model.safetensors").items():
        before, found, after = name.partition(".mlp.")
        if not found:
            made[name] = tensor
            continue
        for expert in range(EXPERTS):
            made[f"{before}.mlp.experts.{expert}.{after}"] = tensor.clone()
        router = torch.randn(EXPERTS, config["hidden_size"], generator=generator)
        made[f"{before}.mlp.gate.weight"] = router.to(tensor.dtype)
    # SGLang's Qwen3-MoE has a head of its own, whatever the configuration says
    made["lm_head.weight"] = made["model.embed_tokens.weight"].clone()
    _write(out / "target", config, made)


@dataclass(frozen=True)
class Latent:
    """Sizes of the ``mla`` target's layers; those of attention a head, as DeepSeek's configuration names them."""

    layers: int = 4
    heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    intermediate: int = 384
    expert: int = 96
    experts: int = 12
    asked: int = 4
    scale: float = 2.5
    """Of the routed experts' sum."""


def permutation(groups: Tensor) -> Tensor:
    """The group after each."""
    after: Tensor = (groups * 5 + 3) % GROUPS
    return after


def group_of(tokens: Tensor) -> Tensor:
    return (tokens - RESERVED) // MEMBERS


def latent_pair(out: Path, shape: Latent = Latent(), seed: int = 11) -> None:
    """``out/target``: a DeepSeek-V3; ``out/draft``: a DFlash drafter for it; ``out/held_out.json``: prompts."""
    shutil.copytree(PAIR, out, ignore=shutil.ignore_patterns("*.safetensors", "*.json", "*.md"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(PAIR / "target" / name, out / "target")
    generator = torch.Generator().manual_seed(seed)
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.expert,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_shared_experts": 1,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.asked,
        "routed_scaling_factor": shape.scale,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
        "use_cache": True,
    }
    _write(out / "target", config, latent_weights(shape, generator))
    draft = json.loads((PAIR / "draft" / "config.json").read_text())
    draft |= {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": 1,
        "head_dim": DRAFT_HEAD_DIM,
        "max_position_embeddings": POSITIONS,
        "rope_theta": THETA,
        "torch_dtype": "float32",
        "eos_token_id": END,
        "pad_token_id": END,
        "tie_word_embeddings": False,
        "num_hidden_layers": 1,
        "max_window_layers": 1,
        "num_target_layers": shape.layers,
        "block_size": BLOCK,
        "layer_types": ["full_attention"],
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [1],
            "block_size": BLOCK,
            "num_target_layers": shape.layers,
        },
    }
    _write(out / "draft", draft, guessing_weights())
    chosen = torch.randint(RESERVED, VOCABULARY, (100, 24), generator=generator).tolist()
    prompts = [{"prompt_ids": ids[: 9 + i % 16], "ar_fp32": []} for i, ids in enumerate(chosen)]
    (out / "held_out.json").write_text(json.dumps(prompts) + "\n")


def latent_weights(shape: Latent, generator: torch.Generator) -> dict[str, Tensor]:
    """Of the target, by DeepSeek's names; float32."""

    def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    def written(columns: int, gain: float = 1.0) -> Tensor:
        """A matrix whose result is added to the hidden state: it leaves the first channels alone."""
        made = weight(HIDDEN, columns, gain)
        made[:CONTENT] = 0.0
        return made

    groups = group_of(torch.arange(RESERVED, VOCABULARY))
    embedding, head = torch.zeros(VOCABULARY, HIDDEN), torch.zeros(VOCABULARY, HIDDEN)
    embedding[RESERVED:, :GROUPS] = 0.5 * torch.eye(GROUPS)[groups]
    content = torch.randn(len(groups), HIDDEN - CONTENT, generator=generator)
    embedding[RESERVED:, CONTENT:] = content / content.norm(dim=1, keepdim=True)
    embedding[:, CONSTANT] = 0.5
    embedding[MASK, MASKED] = 1.0
    # what the drafter prefers among the members of a group, always the same
    embedding[MASK, CONTENT:] = 0.3 * torch.randn(HIDDEN - CONTENT, generator=generator)
    place = permutation(torch.arange(GROUPS)).argsort()
    head[RESERVED:, :GROUPS] = 8.0 * torch.eye(GROUPS)[place[groups]]
    head[RESERVED:, CONTENT:] = weight(len(groups), HIDDEN - CONTENT, 1.5)

    made = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    nope, rope = shape.qk_nope_head_dim, shape.qk_rope_head_dim
    for i in range(shape.layers):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        made |= {
            f"model.layers.{i}.input_layernorm.weight": torch.ones(HIDDEN),
            f"model.layers.{i}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}q_a_proj.weight": weight(shape.q_lora_rank, HIDDEN),
            f"{at}q_a_layernorm.weight": torch.ones(shape.q_lora_rank),
            f"{at}q_b_proj.weight": weight(shape.heads * (nope + rope), shape.q_lora_rank, 1.5),
            f"{at}kv_a_proj_with_mqa.weight": weight(shape.kv_lora_rank + rope, HIDDEN, 1.5),
            f"{at}kv_a_layernorm.weight": torch.ones(shape.kv_lora_rank),
            f"{at}kv_b_proj.weight": weight(shape.heads * (nope + shape.v_head_dim), shape.kv_lora_rank),
            f"{at}o_proj.weight": written(shape.heads * shape.v_head_dim, 0.25),
        }
        if i == 0:
            made |= _mlp(mlp, shape.intermediate, weight, written)
            continue
        made[f"{mlp}gate.weight"] = weight(shape.experts, HIDDEN)
        made[f"{mlp}gate.e_score_correction_bias"] = 0.05 * torch.randn(shape.experts, generator=generator)
        made |= _mlp(f"{mlp}shared_experts.", shape.expert, weight, written)
        for expert in range(shape.experts):
            made |= _mlp(f"{mlp}experts.{expert}.", shape.expert, weight, written)
    return made


def _mlp(at: str, intermediate: int, weight: Any, written: Any) -> dict[str, Tensor]:
    return {
        f"{at}gate_proj.weight": weight(intermediate, HIDDEN),
        f"{at}up_proj.weight": weight(intermediate, HIDDEN),
        f"{at}down_proj.weight": written(intermediate, 0.1),
    }


def guessing_weights() -> dict[str, Tensor]:
    """Of the drafter: what it drafts at place j is the group j - 1 steps of the permutation after the first token's.

    Keys are the same everywhere and queries are turned back by h places in head h, so that by RoPE head h attends to
    the place h before. Values are groups, and context and mask tokens have none: only head j of the block's j-th token
    finds one, the first token's, and its part of the output matrix is j - 1 steps.
    """
    frequencies = THETA ** -(torch.arange(0, DRAFT_HEAD_DIM, 2).double() / DRAFT_HEAD_DIM)
    back = torch.arange(DRAFT_HEADS).double()[:, None] * frequencies
    queries = torch.zeros(DRAFT_HEADS * DRAFT_HEAD_DIM, HIDDEN)
    queries[:, MASKED] = torch.cat((back.cos(), -back.sin()), dim=1).flatten().float()
    keys, values = torch.zeros(DRAFT_HEAD_DIM, HIDDEN), torch.zeros(DRAFT_HEAD_DIM, HIDDEN)
    keys[: DRAFT_HEAD_DIM // 2, CONSTANT] = 1.0
    values[:GROUPS, :GROUPS] = torch.eye(GROUPS)
    out = torch.zeros(HIDDEN, DRAFT_HEADS * DRAFT_HEAD_DIM)
    group = torch.arange(GROUPS)
    for head in range(1, DRAFT_HEADS):
        out[group, head * DRAFT_HEAD_DIM + torch.arange(GROUPS)] = 1.0
        group = permutation(group)
    context = torch.zeros(HIDDEN, HIDDEN)
    context[CONSTANT, CONSTANT] = 1.0
    at, small = "layers.0.", torch.zeros(16, HIDDEN)
    return {
        "fc.weight": context,
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        f"{at}input_layernorm.weight": torch.ones(HIDDEN),
        f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{at}self_attn.q_proj.weight": queries,
        f"{at}self_attn.k_proj.weight": keys,
        f"{at}self_attn.v_proj.weight": values,
        f"{at}self_attn.o_proj.weight": out,
        f"{at}self_attn.q_norm.weight": torch.full((DRAFT_HEAD_DIM,), SHARPNESS),
        f"{at}self_attn.k_norm.weight": torch.full((DRAFT_HEAD_DIM,), SHARPNESS),
        f"{at}mlp.gate_proj.weight": small,
        f"{at}mlp.up_proj.weight": small.clone(),
        f"{at}mlp.down_proj.weight": torch.zeros(HIDDEN, 16),
    }


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


KIMI = Latent(heads=8, q_lora_rank=192, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
KINDS: dict[str, Callable[[Path], None]] = {
    "moe": lambda out: experts_of_pair(PAIR, out),
    "mla": latent_pair,
    "kimi": lambda out: latent_pair(out, KIMI),
}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for kind, write in KINDS.items():
        write(Path(sys.argv[1], kind))
