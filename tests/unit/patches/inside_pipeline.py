"""Inside a tree's Python: the Triton backend over the KV pool of one pipeline stage."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from .configured import configured

HEADS, WIDTH, SWA_WIDTH = 2, 8, 24


def _stages(layers: int, size: int, uneven: str | None) -> list[tuple[int, int]]:
    from sglang.srt.distributed.utils import get_pp_indices

    os.environ.pop("SGLANG_PP_LAYER_PARTITION", None)
    if uneven is not None:
        os.environ["SGLANG_PP_LAYER_PARTITION"] = uneven
    return [get_pp_indices(layers, rank, size) for rank in range(size)]


def _backend(pool: Any, v_head_dim: int, window: int | None, arch: Any, arguments: dict[str, Any] | None = None) -> Any:
    """A backend made by its own ``__init__`` for a runner that has nothing but what that reads."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    model = SimpleNamespace(
        attention_arch=arch or AttentionArch.MHA,
        get_max_num_attention_heads=lambda: HEADS,
        get_num_kv_heads=lambda tp: HEADS,
        v_head_dim=v_head_dim,
        swa_v_head_dim=v_head_dim,
        context_len=64,
        hf_config=SimpleNamespace(architectures=[]),
        is_encoder_decoder=False,
        linear_attn_registry_result=None,
    )
    model.hf_config.get_text_config = lambda: model.hf_config
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=2, req_to_token=torch.zeros(2, 64, dtype=torch.int32)),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(),
        sliding_window_size=window,
        model_config=model,
        device="cpu",
        gpu_id=0,
        is_draft_worker=False,
        server_args=SimpleNamespace(
            triton_attention_num_kv_splits=8,
            chunked_prefill_size=64,
            enable_deterministic_inference=False,
            triton_attention_split_tile_size=None,
        ),
    )
    with configured(**(arguments or {})):
        return TritonAttnBackend(runner)


def v_head_dims(layers: int, size: int, uneven: str | None) -> list[int | str]:
    """Of each stage's backend; the exception's name where there is none. A layer's own width says which was read."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    found: list[int | str] = []
    for start, end in _stages(layers, size, uneven):
        pool = MHATokenToKVPool(
            size=8,
            page_size=1,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=WIDTH,
            layer_num=end - start,
            device="cpu",
            enable_memory_saver=False,
            start_layer=start,
            end_layer=end,
        )
        # its layer of the model, where the pool's own is the same for all
        for layer in range(start, end):
            pool.v_buffer[layer - start] = torch.zeros(9, HEADS, 100 + layer)
        found.append(_width(pool, None))
    return found


def mla_v_head_dims(layers: int, size: int, uneven: str | None) -> list[int | str]:
    """The same over the latent cache of MLA (DeepSeek, Kimi), whose layers are all as wide."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    found: list[int | str] = []
    for start, end in _stages(layers, size, uneven):
        pool = MLATokenToKVPool(
            size=8,
            page_size=1,
            dtype=torch.float32,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            layer_num=end - start,
            device="cpu",
            enable_memory_saver=False,
            start_layer=start,
            end_layer=end,
        )
        found.append(_width(pool, None, AttentionArch.MLA))
    return found


def swa_v_head_dims(layers: int, size: int, uneven: str | None, pattern: int) -> list[int | str]:
    """The same with a sliding window on all but every ``pattern``-th layer."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.model_runner_components.layer_setup import adjust_hybrid_swa_layer_ids

    found: list[int | str] = []
    for start, end in _stages(layers, size, uneven):
        model = SimpleNamespace(
            full_attention_layer_ids=[layer for layer in range(layers) if layer % pattern == pattern - 1],
            swa_attention_layer_ids=[layer for layer in range(layers) if layer % pattern != pattern - 1],
            is_deepseek_v4_arch=False,
        )
        adjust_hybrid_swa_layer_ids(model_config=model, start_layer=start, end_layer=end, is_hybrid_swa=True)
        pool = SWAKVPool(
            size=8,
            size_swa=8,
            page_size=1,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=WIDTH,
            swa_attention_layer_ids=model.swa_attention_layer_ids,
            full_attention_layer_ids=model.full_attention_layer_ids,
            enable_kv_cache_copy=False,
            device="cpu",
        )
        for layer, (index, sliding) in pool.layers_mapping.items():
            (pool.swa_kv_pool if sliding else pool.full_kv_pool).v_buffer[index] = torch.zeros(9, HEADS, 100 + layer)
        found.append(_width(pool, 16))
    return found


def _width(pool: Any, window: int | None, arch: Any = None) -> int | str:
    try:
        return int(_backend(pool, WIDTH, window, arch).v_head_dim)
    except (IndexError, KeyError) as error:
        return type(error).__name__
