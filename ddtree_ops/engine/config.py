"""Model configuration files (HF config.json) of a Qwen3 target and of a DFlash drafter, read strictly.

The DFlash fields are those that SGLang 0.5.17 reads: `dflash_config` {mask_token_id, target_layer_ids, block_size}
and `block_size` at the top level.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration or weight file is missing, malformed, or asks for what this engine does not compute."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a stack of Qwen3 decoder layers, in tokens, channels and heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter: its layers, tokens per block (anchor included) and the target layers it listens to."""

    model: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError when it is unreadable or no object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def load_target_config(directory: Path) -> ModelConfig:
    """Configuration of a Qwen3 target. Raises ConfigError naming file and key."""
    path = directory / "config.json"
    raw = read_json(path)
    if raw.get("architectures") != ["Qwen3ForCausalLM"]:
        raise ConfigError(f"{path}: architectures is {raw.get('architectures')!r}; only ['Qwen3ForCausalLM'] is served")
    eos = _token_ids(raw.get("eos_token_id"), path)
    generation = directory / "generation_config.json"
    if generation.exists():
        eos |= _token_ids(read_json(generation).get("eos_token_id"), generation)
    return _model(raw, path, tuple(sorted(eos)))


def load_draft_config(directory: Path, target: ModelConfig) -> DraftConfig:
    """Configuration of a DFlash drafter for `target`. Raises ConfigError naming file and key."""
    path = directory / "config.json"
    raw = read_json(path)
    if raw.get("architectures") != ["DFlashDraftModel"]:
        raise ConfigError(f"{path}: architectures is {raw.get('architectures')!r}; expected ['DFlashDraftModel']")
    model = _model(raw, path, ())
    for key, mine, theirs in (
        ("hidden_size", model.hidden_size, target.hidden_size),
        ("vocab_size", model.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            raise ConfigError(f"{path}: {key} is {mine}, the target's is {theirs}")
    section = raw.get("dflash_config")
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: dflash_config is missing")
    sizes = {value for value in (section.get("block_size"), raw.get("block_size")) if value is not None}
    if len(sizes) != 1:
        raise ConfigError(
            f"{path}: block_size is missing or stated twice with different values: {sorted(map(str, sizes))}"
        )
    block_size = _integer({"block_size": sizes.pop()}, "block_size", path, low=2)
    mask = _integer(section, "mask_token_id", path, low=0)
    if mask >= model.vocab_size:
        raise ConfigError(f"{path}: mask_token_id {mask} is outside the vocabulary of {model.vocab_size}")
    return DraftConfig(model, block_size, mask, _layer_ids(section.get("target_layer_ids"), target.num_layers, path))


def _layer_ids(value: object, layers: int, path: Path) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise ConfigError(f"{path}: target_layer_ids must be a list of integers, got {value!r}")
    if any(b <= a for a, b in pairwise(value)):
        raise ConfigError(f"{path}: target_layer_ids {value} must ascend: SGLang captures in layer order")
    if value[0] < 0 or value[-1] >= layers - 1:
        raise ConfigError(
            f"{path}: target_layer_ids {value} must lie below the last layer ({layers - 1}): it is never captured"
        )
    return tuple(value)


def _model(raw: dict[str, Any], path: Path, eos: tuple[int, ...]) -> ModelConfig:
    for key, neutral in (
        ("model_type", ("qwen3", None)),
        ("hidden_act", ("silu",)),
        ("attention_bias", (False, None)),
        ("rope_scaling", (None,)),
        ("use_sliding_window", (False, None)),
        ("quantization_config", (None,)),
    ):
        if raw.get(key) not in neutral:
            raise ConfigError(f"{path}: {key} {raw.get(key)!r} is not supported; allowed: {neutral}")
    kinds = raw.get("layer_types")
    if kinds is not None and set(kinds) != {"full_attention"}:
        raise ConfigError(f"{path}: layer_types {kinds!r} is not supported; allowed: full_attention")
    heads = _integer(raw, "num_attention_heads", path)
    kv_heads = _integer(raw, "num_key_value_heads", path)
    head_dim = _integer(raw, "head_dim", path)
    if heads % kv_heads:
        raise ConfigError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim {head_dim} must be even for RoPE")
    vocabulary = _integer(raw, "vocab_size", path)
    if any(token >= vocabulary for token in eos):
        raise ConfigError(f"{path}: eos_token_id {eos} is outside the vocabulary of {vocabulary}")
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=_integer(raw, "hidden_size", path),
        intermediate_size=_integer(raw, "intermediate_size", path),
        num_layers=_integer(raw, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(raw, "rms_norm_eps", path),
        rope_theta=_rope_theta(raw, path),
        max_positions=_integer(raw, "max_position_embeddings", path),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos,
    )


def _rope_theta(raw: dict[str, Any], path: Path) -> float:
    # transformers 5 moved rope_theta into rope_parameters.
    parameters = raw.get("rope_parameters")
    if parameters is None:
        return _positive(raw, "rope_theta", path)
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
        raise ConfigError(f"{path}: rope_parameters {parameters!r} is not supported; allowed: rope_type default")
    return _positive(parameters, "rope_theta", path)


def _integer(raw: dict[str, Any], key: str, path: Path, low: int = 1) -> int:
    value = raw.get(key)
    if type(value) is not int or value < low:
        raise ConfigError(f"{path}: {key} must be an integer >= {low}, got {value!r}")
    return value


def _positive(raw: dict[str, Any], key: str, path: Path) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{path}: {key} must be a positive number, got {value!r}")
    return float(value)


def _token_ids(value: object, path: Path) -> set[int]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in items):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    return set(items)
