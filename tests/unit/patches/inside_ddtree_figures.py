"""Inside a tree's Python: what DDTREE reserves of the KV pool, and what it tells of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ddtree_ops.engine.tree import shape_of

from .bases import here
from .configured import configured

CONTEXT = 64


def reserved(arguments: dict[str, Any], committed: int) -> dict[str, int]:
    """Slots that a request of ``committed`` tokens holds before a step, and what a row of req_to_token has room for."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, get_req_to_token_extra_context_len
    from sglang.srt.speculative import dflash_info_v2

    asked: list[dict[str, Any]] = []
    dflash_info_v2.alloc_for_spec_decode = lambda *_, **given: asked.append(given)
    with configured(**{"speculative_num_steps": 1, "speculative_eagle_topk": 1, "page_size": 1, **arguments}) as given:
        req = here().request(committed, sampling_params=SimpleNamespace(top_k=1))
        batch = SimpleNamespace(
            device="cpu",
            batch_size=lambda: 1,
            reqs=[req],
            tree_cache=None,
            req_to_token_pool=None,
            req_pool_indices=torch.zeros(1),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=arguments.get("page_size", 1)),
            maybe_evict_swa=lambda: None,
        )
        dflash_info_v2.DFlashDraftInputV2.create_idle_input("cpu").prepare_for_decode(batch)
        return {
            "end": int(asked[0]["nxt_kv_lens_cpu"][0]),
            "row": CONTEXT + get_req_to_token_extra_context_len(*here().handed(given)),
            "admitted": get_alloc_reserve_per_decode(*here().handed(given)),
        }


def shapes(seed: int, cases: int) -> list[list[list[int]]]:
    """[ours, the reference engine's] of random batches of trees, some with repeated siblings."""
    from sglang.srt.speculative.ddtree_build import build_trees
    from sglang.srt.speculative.ddtree_info import executed_shape

    found = []
    for case in range(cases):
        generator = torch.Generator().manual_seed(seed + case)
        values = torch.randn(3, 5, 3, generator=generator).log_softmax(-1).sort(-1, descending=True).values
        ids = torch.randint(0, 4, values.shape, generator=generator)
        trees = build_trees(values, ids, torch.tensor([1, 2, 3]), 9)
        mine = executed_shape(trees.tokens.tolist(), trees.next_token.tolist(), trees.next_sibling.tolist())
        parents, depths, tokens = (np.array(a.tolist()) for a in (trees.parents, trees.depths, trees.tokens))
        theirs = shape_of(parents, depths, tokens)
        found.append(
            [[s.nodes, s.max_children, s.max_depth] for s in (mine, theirs)]  # type: ignore[attr-defined]
        )
    return found


def endless() -> list[int]:
    """The figures of links that run in a circle: told, not waited for."""
    from sglang.srt.speculative.ddtree_info import executed_shape

    shape = executed_shape([[5, 6, 7]], [[1, 2, 1]], [[-1, 1, 2]])
    return [shape.nodes, shape.max_children, shape.max_depth]


def accept_rate(arguments: dict[str, Any], accepted: int, steps: int) -> dict[str, Any]:
    """What a finished request is told of ``accepted`` drafts in so many steps."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    manager = object.__new__(TokenizerManager)
    told = SimpleNamespace(
        spec_verify_ct=[steps],
        spec_num_correct_drafts=[accepted],
        spec_correct_drafts_histogram=[[]],
        completion_tokens=[accepted + steps + 1],
    )
    meta: dict[str, Any] = {}
    with configured(**arguments) as manager.server_args:
        manager._calculate_spec_decoding_metrics(meta, told, 0)
    return meta


def internal_state(executed: list[int] | None) -> Any:
    """``executed`` as /server_info shows it."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.speculative.ddtree_info import Executed
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    scheduler = object.__new__(Scheduler)
    shape = None if executed is None else Executed(*executed)
    nothing = SimpleNamespace(
        last_gen_throughput=0.0,
        spec_total_num_forward_ct=0,
        spec_total_num_accept_tokens=0,
        step_time_dict={},
        weight_load_mem_usage=0,
        mem_usage=0,
        graph_memory_usage={},
    )
    scheduler.__dict__.update(
        metrics_reporter=nothing,
        draft_worker=SimpleNamespace(graph_memory_usage={}, executed_shape=lambda: shape),
        tp_worker=SimpleNamespace(model_runner=nothing, graph_memory_usage={}),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: nothing),
        startup_available_gpu_memory_gb=0.0,
        max_total_num_tokens=1,
        swa_tokens_per_layer=None,
        startup_time=0.0,
        max_running_requests=1,
        rust_server=None,
        spec_algorithm=SpeculativeAlgorithm.DDTREE,
    )
    with configured():
        here().without_memory_usage(scheduler)
        return scheduler.get_internal_state(None).internal_state["executed"]
