"""Inside a tree's Python: SGLang's Triton backend over a KV pool, without a server around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .bases import here


def triton_backend(
    pool: Any,
    table: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    v_head_dim: int,
    context_len: int,
    window: int | None = None,
    arch: Any = None,
    page_size: int = 1,
) -> Any:
    """A backend made by its own ``__init__`` for a runner that has nothing but what that reads.

    ``table``: req_to_token, its first row the padding's; ``arch``: MHA when None.
    """
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    model = SimpleNamespace(
        attention_arch=arch or AttentionArch.MHA,
        get_max_num_attention_heads=lambda: heads,
        get_num_kv_heads=lambda *_: kv_heads,
        v_head_dim=v_head_dim,
        swa_v_head_dim=v_head_dim,
        context_len=context_len,
        hf_config=SimpleNamespace(architectures=["Toy"]),
        is_encoder_decoder=False,
        linear_attn_registry_result=None,
    )
    model.hf_config.get_text_config = lambda: model.hf_config
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=table.shape[0] - 1, req_to_token=table),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(),
        sliding_window_size=window,
        model_config=model,
        page_size=page_size,
        device="cpu",
        gpu_id=0,
        is_draft_worker=False,
    )
    here().backend_runner(runner)
    return TritonAttnBackend(runner)
