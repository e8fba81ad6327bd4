"""Inside a tree's Python: SGLang's own DeepSeek-V3 and Qwen3-MoE as a toy_server's target, small and on a CPU.

The whole class: embedding, layers with their attention's projections and routed experts, norms, captured hidden states.
Where a GPU has compiled kernels these layers take PyTorch's arithmetic; attention is the server's own backend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.gpu.kit.kinds import EXPERTS, WITH_EXPERTS, Latent, latent_config, latent_weights
from tests.unit.dense_models import DenseModel

from .toy import Attend, Rows, Shape, Toy


def deepseek() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(configuration, weights): latents, a dense layer and two with experts."""
    shape = Latent(layers=3, experts=6, asked=2)
    return latent_config(shape), latent_weights(shape, torch.Generator().manual_seed(11))


def qwen() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(configuration, weights): grouped queries, three layers with experts that differ."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 48, "intermediate_size": 48}
    fixed = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 256, "hidden_act": "silu"}
    config: dict[str, Any] = {**WITH_EXPERTS, **sizes, **heads, **fixed, "rope_scaling": None, "attention_bias": False}
    words, hidden, inner, size = 128, 64, 48, 32
    generator = torch.Generator().manual_seed(5)

    def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    made = {"model.embed_tokens.weight": weight(words, hidden, 8.0), "lm_head.weight": weight(words, hidden, 2.0)}
    made["model.norm.weight"] = torch.ones(hidden)
    for i in range(3):
        at = f"model.layers.{i}."
        made |= {f"{at}{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
        made |= {f"{at}self_attn.{name}_norm.weight": 1.5 * torch.ones(size) for name in ("q", "k")}
        made[f"{at}self_attn.q_proj.weight"] = weight(4 * size, hidden)
        made |= {f"{at}self_attn.{name}_proj.weight": weight(2 * size, hidden) for name in ("k", "v")}
        made[f"{at}self_attn.o_proj.weight"] = weight(hidden, 4 * size, 2.0)
        made[f"{at}mlp.gate.weight"] = weight(EXPERTS, hidden)
        for expert in range(EXPERTS):
            one = f"{at}mlp.experts.{expert}."
            made |= {f"{one}{name}_proj.weight": weight(inner, hidden) for name in ("gate", "up")}
            made[f"{one}down_proj.weight"] = weight(hidden, inner, 2.0)
    return config, made


KINDS = {"deepseek": deepseek, "qwen": qwen}


@contextmanager
def alone() -> Iterator[None]:
    """One rank, without process groups."""
    from sglang.srt.distributed import parallel_state

    one = SimpleNamespace(world_size=1, rank_in_group=0, rank=0, is_first_rank=True, is_last_rank=True)
    names = ("_TP", "_PP", "_ATTN_TP", "_ATTN_CP", "_MOE_EP", "_MOE_TP", "_MOE_DP")
    kept = {name: getattr(parallel_state, name) for name in names}
    vars(parallel_state).update(dict.fromkeys(names, one))
    try:
        yield
    finally:
        vars(parallel_state).update(kept)


class RealTarget(Toy):
    def __init__(self, kind: str) -> None:
        from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
        from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

        config, weights = KINDS[kind]()
        self._run = functools.lru_cache(64)(DenseModel(config, weights).run)
        # routing would be compiled
        torch.compiler.set_stance("force_eager")
        with torch.inference_mode(False), torch.no_grad():
            made = (DeepseekV3ForCausalLM if kind == "deepseek" else Qwen3MoeForCausalLM)(SimpleNamespace(**config))
            made.load_weights(weights.items())
            for module in made.modules():
                if getattr(module, "quant_method", None) is not None:
                    module.quant_method.process_weights_after_loading(module)
        self.captured = [0, config["num_hidden_layers"] - 2]
        made.set_dflash_layers_to_capture(self.captured)
        self.model = made
        self.vocabulary, self.hidden = config["vocab_size"], config["hidden_size"]
        self.depth = config["num_hidden_layers"]
        self.latents = (config["kv_lora_rank"], config["qk_rope_head_dim"]) if kind == "deepseek" else None

    def radix(self, layer: int) -> Any:
        attention = self.model.model.layers[layer].self_attn
        return attention.attn if self.latents is None else attention.attn_mqa

    @property
    def shape(self) -> Shape:
        of = self.radix(0)
        return Shape(of.tp_q_head_num, of.tp_k_head_num, of.qk_head_dim, of.v_head_dim, of.scaling)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Rows:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        from .sampling import Absent

        def forward(q: Tensor, k: Tensor, v: Tensor, layer: Any, *_: Any, **__: Any) -> Tensor:
            return attend(layer.layer_id, q, k, v)

        names = ("prefill_attention_backend_str", "decode_attention_backend_str", "token_to_kv_pool")
        batch = Absent(forward_mode=ForwardMode.TARGET_VERIFY, positions=positions, input_ids=tokens)
        with forward_context(ForwardContext(attn_backend=SimpleNamespace(forward=forward, **dict.fromkeys(names)))):
            hidden, captured = self.model.model(tokens, positions, batch)
        features = captured if isinstance(captured, Tensor) else torch.cat(list(captured), dim=-1)
        return Rows(hidden @ self.model.lm_head.weight[: self.vocabulary].T, features)

    def dense(self, tokens: list[int]) -> Rows:
        run = self._run(tuple(tokens))
        return Rows(run.logits, torch.cat([run.after[layer] for layer in self.captured], dim=-1))

    def kept(self, tokens: list[int]) -> list[list[Tensor]]:
        return self._run(tuple(tokens)).kept
