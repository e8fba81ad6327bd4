"""The tiny pair inside a target of an 8B model's shape: step times are those of real weights, and the tokens are known.

    python -m benchmarks.gpu.pad OUT        (needs torch and safetensors; writes about 19 GB; a GPU makes it quicker)

The pair's weights stand in the first columns and rows of large matrices. What the padding computes is thrown away: the
hidden state is zero beyond the pair's own columns, because the rows of ``o_proj`` and ``down_proj`` that would write
there are zero, as are their columns that would read unused heads and channels. All other padding is random, as weights
are. Further layers have ``o_proj`` and ``down_proj`` all zero, so they pass the hidden state on. RMSNorm divides by the
root of a mean over columns of which most are zero: its weight is scaled by sqrt(small / large), its epsilon by
small / large, both powers of two for the sizes here. Vocabulary rows beyond the pair's repeat the row of the drafter's
mask token, which the target never emits.

So the padded pair's logits are the pair's own, but for the order of summation.
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

PAIR = Path(__file__).parents[2] / "ddtree_ops" / "engine" / "pair"
STD = 0.02
"""Of the padding's random weights."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the padded models. ``head_dim`` stays the pair's, whose RoPE depends on it; an 8B model has half the
    heads and twice the head size, hence the same matrices and the same bytes of KV."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 64
    kv_heads: int = 16
    target_layers: int = 42
    draft_layers: int = 4
    vocabulary: int = 151936
    positions: int = 16384


class Padder:
    """Pads one model's tensors. ``device``: where random weights are made."""

    def __init__(self, config: dict[str, Any], shape: Shape, device: str) -> None:
        self.config, self.shape, self.device = config, shape, device
        self.generator = torch.Generator(device).manual_seed(1)
        self.group, self.large_group = (
            config["num_attention_heads"] // config["num_key_value_heads"],
            shape.heads // shape.kv_heads,
        )
        if self.group > self.large_group:
            raise ValueError(f"{self.large_group} heads a KV head are fewer than the pair's {self.group}")

    def padded_config(self, layers: int) -> dict[str, Any]:
        shape, small = self.shape, self.config
        return {
            **small,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "num_hidden_layers": layers,
            "max_window_layers": layers,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.positions,
            "rms_norm_eps": small["rms_norm_eps"] * small["hidden_size"] / shape.hidden,
        }

    def random(self, rows: int, columns: int) -> Tensor:
        made = torch.empty((rows, columns), device=self.device, dtype=torch.bfloat16)
        return made.normal_(0.0, STD, generator=self.generator).cpu()

    def norm(self, weight: Tensor) -> Tensor:
        large = torch.ones(self.shape.hidden, dtype=weight.dtype)
        large[: len(weight)] = weight * math.sqrt(self.config["hidden_size"] / self.shape.hidden)
        return large

    def rows_of_head(self, head: int) -> slice:
        """Where a head of the pair stands among the query heads: its group begins where its KV head's does."""
        size = self.config["head_dim"]
        start = (head // self.group * self.large_group + head % self.group) * size
        return slice(start, start + size)

    def reading(self, weight: Tensor, rows: int) -> Tensor:
        """q, k, v, gate, up: random beyond the pair's rows; its columns first, random where the hidden state is 0."""
        large = self.random(rows, self.shape.hidden)
        large[: weight.shape[0], : weight.shape[1]] = weight
        return large

    def queries(self, weight: Tensor) -> Tensor:
        size = self.config["head_dim"]
        large = self.random(self.shape.heads * size, self.shape.hidden)
        for head in range(self.config["num_attention_heads"]):
            large[self.rows_of_head(head), : weight.shape[1]] = weight[head * size : (head + 1) * size]
        return large

    def from_heads(self, weight: Tensor) -> Tensor:
        size = self.config["head_dim"]
        large = torch.zeros((self.shape.hidden, self.shape.heads * size), dtype=weight.dtype)
        for head in range(self.config["num_attention_heads"]):
            large[: weight.shape[0], self.rows_of_head(head)] = weight[:, head * size : (head + 1) * size]
        return large

    def down(self, weight: Tensor) -> Tensor:
        large = torch.zeros((self.shape.hidden, self.shape.intermediate), dtype=weight.dtype)
        large[: weight.shape[0], : weight.shape[1]] = weight
        return large

    def layer(self, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """A layer of the pair, its names below ``prefix``."""
        shape, size = self.shape, self.config["head_dim"]
        pads: dict[str, Callable[[Tensor], Tensor]] = {
            "input_layernorm": self.norm,
            "post_attention_layernorm": self.norm,
            "self_attn.q_norm": Tensor.clone,
            "self_attn.k_norm": Tensor.clone,
            "self_attn.q_proj": self.queries,
            "self_attn.k_proj": lambda w: self.reading(w, shape.kv_heads * size),
            "self_attn.v_proj": lambda w: self.reading(w, shape.kv_heads * size),
            "self_attn.o_proj": self.from_heads,
            "mlp.gate_proj": lambda w: self.reading(w, shape.intermediate),
            "mlp.up_proj": lambda w: self.reading(w, shape.intermediate),
            "mlp.down_proj": self.down,
        }
        return {f"{prefix}{name}.weight": pad(tensors[f"{prefix}{name}.weight"]) for name, pad in pads.items()}

    def identity(self, tensors: dict[str, Tensor], first: str, prefix: str) -> dict[str, Tensor]:
        """A layer that computes as much as any and adds nothing: the pair's first with two matrices zero."""
        writing = (f"{first}self_attn.o_proj.weight", f"{first}mlp.down_proj.weight")
        silent = {**tensors, **{name: torch.zeros_like(tensors[name]) for name in writing}}
        return {name.replace(first, prefix, 1): tensor for name, tensor in self.layer(silent, first).items()}


def pad(pair: Path, out: Path, shape: Shape) -> None:
    """``out/target`` and ``out/draft`` beside the pair's other files. Raises ValueError for sizes that do not fit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shutil.copytree(pair, out, ignore=shutil.ignore_patterns("*.safetensors"))
    draft_config = json.loads((pair / "draft" / "config.json").read_text())
    mask = draft_config["dflash_config"]["mask_token_id"]

    target = Padder(json.loads((pair / "target" / "config.json").read_text()), shape, device)
    tensors = load_file(pair / "target" / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    large = torch.zeros((shape.vocabulary, shape.hidden), dtype=embedding.dtype)
    large[:, : embedding.shape[1]] = embedding[mask]
    large[: embedding.shape[0], : embedding.shape[1]] = embedding
    rest = {"model.embed_tokens.weight": large, "model.norm.weight": target.norm(tensors["model.norm.weight"])}
    _write(out / "target", target, tensors, "model.layers.", shape.target_layers, rest)

    draft = Padder(draft_config, shape, device)
    tensors = load_file(pair / "draft" / "model.safetensors")
    small, inputs = tensors["fc.weight"].shape[0], len(draft_config["dflash_config"]["target_layer_ids"])
    fc = torch.zeros((shape.hidden, inputs * shape.hidden), dtype=tensors["fc.weight"].dtype)
    for i in range(inputs):
        fc[:small, i * shape.hidden : i * shape.hidden + small] = tensors["fc.weight"][:, i * small : (i + 1) * small]
    rest = {"fc.weight": fc, **{f"{n}.weight": draft.norm(tensors[f"{n}.weight"]) for n in ("hidden_norm", "norm")}}
    draft.config["num_target_layers"] = draft.config["dflash_config"]["num_target_layers"] = shape.target_layers
    draft.config["layer_types"] = ["full_attention"] * shape.draft_layers
    _write(out / "draft", draft, tensors, "layers.", shape.draft_layers, rest)


def _write(
    folder: Path, padder: Padder, tensors: dict[str, Tensor], prefix: str, layers: int, rest: dict[str, Tensor]
) -> None:
    """A file a layer and an index of them."""
    files: dict[str, str] = {}
    total = 0

    def write(name: str, content: dict[str, Tensor]) -> None:
        nonlocal total
        save_file(content, folder / name)
        files.update(dict.fromkeys(content, name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in content.values())

    write("model-rest.safetensors", rest)
    for i in range(layers):
        place = f"{prefix}{i}."
        there = f"{place}input_layernorm.weight" in tensors
        made = padder.layer(tensors, place) if there else padder.identity(tensors, f"{prefix}0.", place)
        write(f"model-{i:03}.safetensors", {name: tensor.contiguous() for name, tensor in made.items()})
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(padder.padded_config(layers), indent=1) + "\n")
    print(f"{folder}: {total / 1e9:.2f} GB in {layers} layers", flush=True)


if __name__ == "__main__":
    pad(PAIR, Path(sys.argv[1]), Shape()) if len(sys.argv) == 2 else sys.exit(__doc__)
