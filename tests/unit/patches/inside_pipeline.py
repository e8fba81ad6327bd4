"""Inside a tree's Python: the Triton backend over the KV pool of one pipeline stage."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from .backend import triton_backend
from .configured import configured

HEADS, WIDTH, SWA_WIDTH = 2, 8, 24


def _stages(layers: int, size: int, uneven: str | None) -> list[tuple[int, int]]:
    from sglang.srt.distributed.utils import get_pp_indices

    os.environ.pop("SGLANG_PP_LAYER_PARTITION", None)
    if uneven is not None:
        os.environ["SGLANG_PP_LAYER_PARTITION"] = uneven
    return [get_pp_indices(layers, rank, size) for rank in range(size)]


def stage_backend(
    pool: Any, window: int | None = None, arch: Any = None, arguments: dict[str, Any] | None = None
) -> Any:
    """A backend of two requests and 64 tokens each, under these server arguments."""
    table = torch.zeros(3, 64, dtype=torch.int32)
    with configured(**(arguments or {})):
        return triton_backend(
            pool, table, heads=HEADS, kv_heads=HEADS, v_head_dim=WIDTH, context_len=64, window=window, arch=arch
        )


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
        return int(stage_backend(pool, window, arch).v_head_dim)
    except (IndexError, KeyError) as error:
        return type(error).__name__
