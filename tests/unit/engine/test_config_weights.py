"""Model files that are wrong are refused, and the error names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree_ops.engine.config import ConfigError, load_draft_config, load_target_config
from ddtree_ops.engine.loading import build_decoder, resolve

from .conftest import arguments
from .pairs import write_pair

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A pair that a test may spoil."""
    return write_pair(tmp_path / "pair")


def spoil(path: Path, change: Change) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def dflash(**values: object) -> Change:
    return lambda raw: raw["dflash_config"].update(values)


def top(**values: object) -> Change:
    return lambda raw: raw.update(values)


@pytest.mark.parametrize(
    "change, named",
    [
        (top(architectures=["LlamaForCausalLM"]), "architectures"),
        (top(hidden_size="24"), "hidden_size"),
        (top(num_hidden_layers=0), "num_hidden_layers"),
        (top(num_key_value_heads=3), "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (top(head_dim=7), "head_dim"),
        (top(attention_bias=True), "attention_bias"),
        (top(rope_scaling={"type": "yarn"}), "rope_scaling"),
        (top(rope_parameters={"rope_type": "yarn"}), "rope_parameters"),
        (top(use_sliding_window=True), "use_sliding_window"),
        (top(layer_types=["sliding_attention"]), "layer_types"),
        (top(hidden_act="gelu"), "hidden_act"),
        (top(quantization_config={"bits": 4}), "quantization_config"),
        (top(eos_token_id=16), "eos_token_id"),
        (top(eos_token_id="0"), "eos_token_id"),
        (top(rms_norm_eps=0), "rms_norm_eps"),
        (lambda raw: raw.pop("rope_theta"), "rope_theta"),
    ],
)
def test_a_target_configuration_that_cannot_be_computed_is_refused(own: Path, change: Change, named: str) -> None:
    spoil(own / "target" / "config.json", change)
    with pytest.raises(ConfigError, match=rf"target/config\.json: {named}"):
        load_target_config(own / "target")


@pytest.mark.parametrize(
    "change, named",
    [
        (top(architectures=["Qwen3ForCausalLM"]), "architectures"),
        (dflash(target_layer_ids=[2, 0]), "target_layer_ids"),
        (dflash(target_layer_ids=[0, 0]), "target_layer_ids"),
        (dflash(target_layer_ids=[0, 3]), "target_layer_ids .* last layer"),
        (dflash(target_layer_ids=[-1]), "target_layer_ids"),
        (dflash(target_layer_ids=[]), "target_layer_ids"),
        (dflash(target_layer_ids=[True]), "target_layer_ids"),
        (dflash(target_layer_ids=None), "target_layer_ids"),
        (dflash(mask_token_id=16), "mask_token_id"),
        (dflash(mask_token_id=None), "mask_token_id"),
        (dflash(block_size=6), "block_size"),
        (top(block_size=1, dflash_config={"target_layer_ids": [0], "mask_token_id": 1}), "block_size"),
        (top(dflash_config=None), "dflash_config"),
        (top(hidden_size=32), "hidden_size is 32, the target's is 24"),
        (top(vocab_size=17), "vocab_size is 17"),
    ],
)
def test_a_drafter_configuration_that_does_not_fit_is_refused(own: Path, change: Change, named: str) -> None:
    spoil(own / "draft" / "config.json", change)
    with pytest.raises(ConfigError, match=rf"draft/config\.json: {named}"):
        load_draft_config(own / "draft", load_target_config(own / "target"))


def test_end_tokens_come_from_both_files_and_rope_theta_from_either_place(own: Path) -> None:
    (own / "target" / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    spoil(own / "target" / "config.json", lambda r: r.update(rope_parameters={"rope_theta": r.pop("rope_theta") * 2}))
    config = load_target_config(own / "target")
    assert config.eos_token_ids == (0, 3, 7)
    assert config.rope_theta == 20000.0


def test_a_file_that_is_no_configuration_is_refused(own: Path) -> None:
    path = own / "target" / "config.json"
    for text, why in (("{", "not JSON"), ("[]", "object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            load_target_config(own / "target")
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_target_config(own / "target")


@pytest.mark.parametrize("model", ["target", "draft"])
@pytest.mark.parametrize(
    "change, named",
    [
        (lambda w, n: w.pop(n), "missing tensor {n}"),
        (lambda w, n: w.update({"model.extra": torch.ones(2)}), r"unknown tensor model\.extra"),
        (lambda w, n: w.update({n: torch.ones(3, 5)}), r"tensor {n} has shape \[3, 5\], expected"),
        (lambda w, n: w.update({n: torch.full_like(w[n], float("nan"))}), "{n} holds values that are not finite"),
    ],
)
def test_weights_that_are_not_exactly_the_layout_are_refused(
    own: Path, model: str, change: Callable[[dict[str, Tensor], str], object], named: str
) -> None:
    file = own / model / "model.safetensors"
    weights = load_file(file)
    name = next(n for n in weights if n.endswith("layers.1.self_attn.k_proj.weight"))
    change(weights, name)
    save_file(weights, file)
    a = arguments(own, "8/4")
    with pytest.raises(ConfigError, match=named.format(n=name.replace(".", r"\."))):
        build_decoder(a, resolve(a))


def test_a_head_beside_tied_embeddings_is_unknown(own: Path) -> None:
    file = own / "target" / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.ones(16, 24)}, file)
    a = arguments(own, "AR")
    with pytest.raises(ConfigError, match=r"unknown tensor lm_head\.weight"):
        build_decoder(a, resolve(a))


def test_shards_are_read_together_and_a_repeated_tensor_is_refused(own: Path) -> None:
    file = own / "target" / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    names = sorted(weights)
    halves = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, held in halves.items():
        save_file({n: weights[n] for n in held}, file.with_name(shard))
    index = file.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {n: shard for shard, held in halves.items() for n in held}}))
    a = arguments(own, "AR")
    build_decoder(a, resolve(a))
    save_file({n: weights[n] for n in [*halves["b.safetensors"], names[0]]}, file.with_name("b.safetensors"))
    with pytest.raises(ConfigError, match="two shards"):
        build_decoder(a, resolve(a))


def test_a_file_that_is_no_safetensors_is_refused(own: Path) -> None:
    (own / "draft" / "model.safetensors").write_bytes(b"nothing of the kind")
    a = arguments(own, "8/4")
    with pytest.raises(ConfigError, match=r"draft/model\.safetensors"):
        build_decoder(a, resolve(a))
