"""Strict loading of safetensors: every expected tensor present with its shape, and nothing else in the files.

SGLang 0.5.17 silently ignores unknown names; a misnamed tensor there means an untrained one. Here it is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import ConfigError, ModelConfig, read_json

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(config: ModelConfig, prefix: str) -> Shapes:
    """Names and shapes of the decoder layers, linear weights as [out, in]."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    one: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {f"{prefix}layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in one.items()}


def target_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a Qwen3 target; `lm_head.weight` only where the embeddings are not tied."""
    shapes = layer_shapes(config, "model.")
    shapes["model.embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def draft_shapes(config: ModelConfig, features: int) -> Shapes:
    """Every tensor of a DFlash drafter that hears `features` target layers; it has neither embedding nor head."""
    hidden = config.hidden_size
    return layer_shapes(config, "") | {
        "fc.weight": (hidden, features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }


def load_weights(
    directory: Path, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Tensors of all shards in `directory`, cast to `dtype`.

    Raises ConfigError that names unknown, missing and repeated tensors, wrong shapes, and values that are not finite.
    """
    loaded: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for path in _shards(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    if name not in expected:
                        problems.append(f"unknown tensor {name}")
                    elif name in loaded:
                        problems.append(f"tensor {name} is in two shards")
                    elif tuple(file.get_slice(name).get_shape()) != expected[name]:
                        shape = list(file.get_slice(name).get_shape())
                        problems.append(f"tensor {name} has shape {shape}, expected {list(expected[name])}")
                    else:
                        loaded[name] = file.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
    seen = {problem.split()[1] for problem in problems if problem.startswith("tensor")}
    problems += [f"missing tensor {name}" for name in expected if name not in loaded and name not in seen]
    problems += [
        f"tensor {name} holds values that are not finite" for name, t in loaded.items() if not t.isfinite().all()
    ]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ConfigError(f"{directory}: {'; '.join(problems[:8])}{more}")
    return loaded


def digest(directory: Path) -> str:
    """Hex SHA-256 over all shards in `directory`. Raises ConfigError when one cannot be read."""
    found = hashlib.sha256()
    for path in _shards(directory):
        try:
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return found.hexdigest()


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise ConfigError(f"{index}: weight_map must map tensor names to files")
    return [directory / name for name in sorted(set(mapping.values()))]
