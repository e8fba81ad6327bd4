"""SGLang 0.5.23: arguments are declared and published, each rank knows its place, slots are planned for each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

READ_DONE = "shared_read_done_event"
"""Of a runner: after which event the scheduler may write again what a step reads."""
TMA = ("down_moe_use_tma", "up_moe_use_tma")
"""Ways of the fused experts' kernels that need a GPU."""


def alone() -> dict[str, Any]:
    """What is said of ranks where there is one."""
    groups = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp", "dcp", "attn_dcp")
    return {f"{group}_{kind}": int(kind == "size") for group in groups for kind in ("size", "rank")} | {
        "tp_group": SimpleNamespace(world_size=1, rank_in_group=0)
    }


@contextmanager
def resolving(arguments: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(server arguments as the hook of speculation gets them, what reads one of them by name)."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolution_result
    from sglang.srt.server_args import ServerArgs

    if arguments.pop("enable_dp_attention", False):
        # what the flag has become by then
        arguments["attn_dp_size"] = 2
    server_args = ServerArgs(model_path="dummy")
    server_args.resolve_once()
    declare_resolution(server_args, "a test", **arguments)
    yield server_args, lambda name: resolution_result(server_args, name)


def handed(server_args: Any) -> tuple[Any, ...]:
    """What of the configuration SGLang's functions are given that ask for some of it."""
    return ()


def verify_width(asked: Any, server_args: Any) -> int:
    """asked: resolve_num_tokens_per_req for an algorithm and one of its workers."""
    return int(asked(phase="target_verify"))


@contextmanager
def of_two_ranks(runner: Any, topk: int) -> Iterator[None]:
    """The runner is of two ranks that draft trees of so many candidates a position."""
    from sglang.srt.runtime_context import get_context, get_parallel

    with (
        get_context().override_server_args(speculative_ddtree_topk=topk, tp_size=2),
        get_parallel().override(tp_size=2),
    ):
        yield


def backend_runner(runner: SimpleNamespace) -> None:
    """What else a backend reads of its runner. The runner is changed."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner.spec_algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    runner.kv_cache_dtype = runner.token_to_kv_pool.dtype
    runner.model_config.head_dim = runner.model_config.v_head_dim
    runner.decode_num_tokens_per_req = ModelRunner.decode_num_tokens_per_req.__get__(runner)
    plan_slots(runner)


def server_runner(runner: SimpleNamespace, graphs: int) -> None:
    """What else worker and forward batches read of the target's runner. graphs: the largest captured batch, or 0."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, Phase, with_phase
    from sglang.srt.runtime_context import get_context

    runner.lora_manager = None
    runner.model_config.requires_mm_token_modalities = False
    runner.kv_index_translator = runner.attn_backend.kv_index_translator
    captured = with_phase(CudaGraphConfig(), Phase.DECODE, bs=list(range(1, graphs + 1)))
    get_context().override("a test", cuda_graph_config=captured)


def runner_of(kind: Any, model: Any, server_args: Any) -> Any:
    """A drafter's ModelRunner of a class, alone."""
    return kind(model, 0.5, 0, 1, server_args, is_draft_worker=True)


def without_memory_usage(scheduler: Any) -> None:
    """Let a scheduler without a device tell of itself."""
    from sglang.srt.managers.scheduler_components import internal_state

    internal_state.build_memory_usage = lambda **_: {}
    scheduler.internal_state = internal_state.SchedulerInternalStateController(scheduler, False)


def plan_slots(runner: SimpleNamespace) -> None:
    """Give a runner what names the slots that a step writes and reads."""
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=getattr(runner, "token_to_kv_pool_allocator", None),
        token_to_kv_pool=getattr(runner, "token_to_kv_pool", None),
        page_size=getattr(runner, "page_size", 1),
        device="cpu",
    )


def unplanned() -> dict[str, Any]:
    """What a backend's buffers are filled by, beside the batch, where no slot is read."""
    return {"plan": None}


def request(committed: int, **more: Any) -> Any:
    """One that has so many tokens, and slots for them."""
    kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=committed)
    return SimpleNamespace(kv=kv, decode_batch_idx=0, **more)


def draft_runner(target: Any, forward: Any) -> Any:
    """A drafter's, without graphs, its KV in the target's slots. forward: its pass over a block."""
    translator = target.kv_index_translator
    return SimpleNamespace(forward=forward, decode_cuda_graph_runner=None, kv_index_translator=translator)


def worker_fields() -> dict[str, Any]:
    """What else the worker's ``__init__`` leaves in it."""
    return {
        "draft_model": SimpleNamespace(),
        "selector": None,
        "lilicorr": None,
        "draft_parallel_layout": SimpleNamespace(tp_group=None),
        "_full_embed_gpu": None,
        "_is_domino": False,
        "_noise_embed_scale": 1.0,
        "_target_logits_processor": None,
        "_selector_sample": None,
        "_tp_sync": SimpleNamespace(sync=lambda *_: None),
        "_target_tp_rank": 0,
    }


def bound(batch: Any, runner: Any) -> Any:
    """A batch made by hand, its slots as the runner's kernels take them."""
    runner.kv_index_translator.bind_own_plan(batch)
    return batch


def draw_as_a_gpu() -> None:
    """Seeded noise by the kernel that a GPU has, where SGLang would take a compiled one of a CPU's."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
    from sglang.srt.layers import sampler

    def hashed(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(seed), len(columns)), dtype=torch.uint32)
        murmur_hash32_kernel[(len(seed), 1)](seed, positions, columns, out, *out.shape, BLOCK_SIZE=1024)
        return out

    sampler.murmur_hash32 = hashed


def check_planned(batch: Any) -> None:
    """Raises AssertionError for a batch whose slots nobody has planned. Pools that rename none would not notice."""
    assert batch.kv_loc_plan is not None and batch.out_cache_loc_is_physical, "its slots are not planned"


def join(rank: int, size: int) -> None:
    """Make the groups of so many ranks, of which this process is one."""
    from sglang.srt.distributed import initialize_model_parallel
    from sglang.srt.runtime_context import get_context, get_parallel

    said = alone()
    del said["tp_group"]
    for group in ("tp", "attn_tp", "moe_tp"):
        said |= {f"{group}_size": size, f"{group}_rank": rank}
    with get_context().override_server_args(tp_size=size):
        get_parallel().override_permanently(**said)
        initialize_model_parallel(backend="gloo")


def reserve(draft_input: Any, lens: torch.Tensor) -> None:
    """Tell a step how far its slots reach, which the host knows without asking the device."""
    draft_input.nxt_kv_lens_cpu, draft_input.nxt_kv_lens_sum = lens, int(lens.sum())
