"""SGLang 0.5.17: arguments are attributes, slots have one number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

READ_DONE = "war_fastpath_read_done_event"
"""Of a runner: after which event the scheduler may write again what a step reads."""
TMA = ("down_moe_use_tma",)
"""Ways of the fused experts' kernels that need a GPU."""


def alone() -> dict[str, Any]:
    """What is said of ranks where there is one."""
    groups = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")
    return {f"{group}_{kind}": int(kind == "size") for group in groups for kind in ("size", "rank")}


@contextmanager
def resolving(arguments: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(server arguments as the hook of speculation gets them, what reads one of them by name)."""
    from ..configured import configured

    with configured(**arguments) as server_args:
        # as it is when the hook runs, before the arguments are sealed
        vars(server_args)["_declarations_materialized"] = False
        yield server_args, lambda name: getattr(server_args, name)


def handed(server_args: Any) -> tuple[Any, ...]:
    """What of the configuration SGLang's functions are given that ask for some of it."""
    return (server_args,)


def verify_width(asked: Any, server_args: Any) -> int:
    """asked: resolve_num_tokens_per_req for an algorithm and one of its workers."""
    return int(asked(phase="target_verify", server_args=server_args))


@contextmanager
def of_two_ranks(runner: Any, topk: int) -> Iterator[None]:
    """The runner is of two ranks that draft trees of so many candidates a position."""
    runner.ps, runner.server_args = SimpleNamespace(tp_size=2), SimpleNamespace(speculative_ddtree_topk=topk)
    yield


def backend_runner(runner: SimpleNamespace) -> None:
    """What else a backend reads of its runner. The runner is changed."""
    runner.server_args = SimpleNamespace(
        triton_attention_num_kv_splits=8,
        chunked_prefill_size=64,
        enable_deterministic_inference=False,
        triton_attention_split_tile_size=None,
    )


def server_runner(runner: SimpleNamespace, graphs: int) -> None:
    """What else worker and forward batches read of the target's runner. graphs: the largest captured batch, or 0."""
    decode = SimpleNamespace(bs=list(range(1, graphs + 1)))
    runner.server_args.cuda_graph_config = SimpleNamespace(decode=decode)


def runner_of(kind: Any, model: Any, server_args: Any) -> Any:
    """A drafter's ModelRunner of a class, alone."""
    rank = SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, gpu_id=0, dp_rank=None)
    return kind(model, 0.5, 0, rank, 1, server_args, is_draft_worker=True)


def without_memory_usage(scheduler: Any) -> None:
    """Let a scheduler without a device tell of itself."""
    from sglang.srt.managers import scheduler as module

    module.build_memory_usage = lambda **_: {}


def plan_slots(runner: SimpleNamespace) -> None:
    """Give a runner what names the slots that a step writes and reads. Here they have one name."""


def unplanned() -> dict[str, Any]:
    """What a backend's buffers are filled by, beside the batch, where no slot is read."""
    return {}


def request(committed: int, **more: Any) -> Any:
    """One that has so many tokens, and slots for them."""
    return SimpleNamespace(kv_committed_len=committed, kv=SimpleNamespace(kv_allocated_len=committed), **more)


def draft_runner(target: Any, forward: Any) -> Any:
    """A drafter's, without graphs. forward: its pass over a block."""
    return SimpleNamespace(forward=forward, decode_cuda_graph_runner=None)


def worker_fields() -> dict[str, Any]:
    """What else the worker's ``__init__`` leaves in it."""
    return {"ps": SimpleNamespace(tp_rank=0)}


def bound(batch: Any, runner: Any) -> Any:
    """A batch made by hand, its slots as the runner's kernels take them."""
    return batch


def draw_as_a_gpu() -> None:
    """Seeded noise by the kernel that a GPU has. It is everyone's here."""


def check_planned(batch: Any) -> None:
    """Raises AssertionError for a batch that a target may not be given. Slots need no plan here."""


def join(rank: int, size: int) -> None:
    """Make the groups of so many ranks, of which this process is one."""
    from sglang.srt.distributed import initialize_model_parallel

    initialize_model_parallel(tensor_model_parallel_size=size, backend="gloo")


def reserve(draft_input: Any, lens: torch.Tensor) -> None:
    """Tell a step how far its slots reach, which the host knows without asking the device."""
    draft_input.reserved_seq_lens_cpu, draft_input.reserved_seq_lens_sum = lens, int(lens.sum())
