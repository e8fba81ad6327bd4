"""Inside a tree's Python: what graphs are captured with, and what the Triton backend allocates for them."""

from __future__ import annotations

import contextlib
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .bases import here
from .configured import configured
from .inside_pipeline import HEADS, WIDTH, stage_backend

CHAIN: dict[str, Any] = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8}


def tree(budget: int) -> dict[str, Any]:
    return {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": budget,
        "speculative_ddtree_topk": 4,
        "speculative_num_draft_tokens": budget + 1,
        "speculative_dflash_block_size": 8,
        "speculative_eagle_topk": 1,
    }


def _runner(algorithm: str, draft: bool, width: int, buffer: Any) -> Any:
    """The decode graph runner after an ``__init__`` that captured nothing."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    backend = type("TritonAttnBackend", (), {"verify_mask": SimpleNamespace(buffer=buffer)})()
    runner = object.__new__(DecodeCudaGraphRunner)
    runner.__dict__.update(
        model_runner=SimpleNamespace(
            spec_algorithm=SpeculativeAlgorithm.from_string(algorithm), is_draft_worker=draft, attn_backend=backend
        ),
        attn_backend=backend,
        captured_req_width=width,
        ragged_verify_mode=False,
        buffers=SimpleNamespace(custom_mask="not the buffer"),
    )
    return runner


def captured(algorithm: str, draft: bool, width: int) -> dict[str, Any]:
    """The verify input that a graph is captured with."""
    buffer = torch.zeros(10, dtype=torch.uint8)
    with configured():
        made = _runner(algorithm, draft, width, buffer).get_spec_info(width)
    mask = made.custom_mask
    return {
        "kind": type(made).__name__,
        "width": made.draft_token_num,
        "mask": None if mask is None else mask.data_ptr() == buffer.data_ptr(),
        "hidden": made.capture_hidden_mode.name,
    }


def other_width(algorithm: str) -> str | bool:
    """What happens to a batch of 9 tokens a request where 17 were captured."""
    batch = SimpleNamespace(replace_embeds=None, spec_info=SimpleNamespace(num_tokens_per_req=9))
    try:
        return bool(_runner(algorithm, False, 17, None).can_run_graph(batch))
    except RuntimeError as error:
        return str(error)


def unfit_graphs(change: dict[str, int | None]) -> str | None:
    """What the worker says after capture."""
    from sglang.srt.speculative.ddtree_checks import check_graphs

    widths = {"target": 17, "draft": 8, **change}
    target, draft = (
        SimpleNamespace(
            decode_cuda_graph_runner=None if widths[name] is None else SimpleNamespace(captured_req_width=widths[name])
        )
        for name in ("target", "draft")
    )
    try:
        check_graphs(target, draft, 17, 8)
    except RuntimeError as error:
        return str(error)
    return None


def captured_mask(which: str) -> str | None:
    """What is said while a graph is captured whose metadata has the mask's own buffer, a copy of it, or none."""
    from sglang.srt.speculative.ddtree_checks import check_captured_mask

    buffer = torch.zeros(10, dtype=torch.uint8)
    masks = {"the buffer": buffer, "a copy": buffer.clone(), "none": None}
    try:
        check_captured_mask(
            SimpleNamespace(
                verify_mask=SimpleNamespace(buffer=buffer),
                forward_metadata=SimpleNamespace(custom_mask=masks[which]),
            )
        )
    except RuntimeError as error:
        return str(error)
    return None


def ran_eagerly(captured_to: int | None, bs: int) -> str | None:
    """What a step without a graph raises, where graphs of so many requests were captured."""
    from sglang.srt.speculative.ddtree_checks import Checks

    graphs = None if captured_to is None else SimpleNamespace(max_bs=captured_to, captured_req_width=9)
    with configured():
        try:
            Checks(8, 7).eager(graphs, bs, "verify")
        except RuntimeError as error:
            return str(error)
    return None


def penalised_in_a_batch(state: str) -> str | None:
    """What a verify says to a request and one with a penalty that was ``served``, ``refused`` or is ``finished``."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.ddtree_checks import Checks

    with configured():
        reqs = []
        for penalty in (0.0, 0.7):
            params = SamplingParams(max_new_tokens=4, frequency_penalty=penalty)
            params.normalize(None)
            reqs.append(Req("one", "", array("q", [5, 6, 7]), params))
        if state == "refused":
            reqs[1].set_finish_with_abort("no")
        elif state == "finished":
            reqs[1].finished_reason = FINISH_LENGTH(4)
        try:
            Checks(8, 7).request(SimpleNamespace(reqs=reqs, has_grammar=False))
        except RuntimeError as error:
            return str(error)
    return None


def watched(raises: bool) -> dict[str, Any]:
    """What SGLang's watch over KV slots did while the start-up canary ran, and what is left of it."""
    from sglang.srt.kv_canary.state import ViolationLog
    from sglang.srt.speculative.ddtree_canary import unwatched

    log = ViolationLog.allocate(ring_capacity=4, device=torch.device("cpu"))
    steps: list[str] = []
    reports = SimpleNamespace(step=lambda: steps.append("told"))
    watch = SimpleNamespace(_violation_manager=reports, _device_state=SimpleNamespace(violation_log=log))
    with contextlib.suppress(KeyError), unwatched(watch):
        watch._violation_manager.step()
        log.violation_ring[0] = 7
        log.violation_write_index.add_(1)
        if raises:
            raise KeyError
    during = len(steps)
    watch._violation_manager.step()
    return {
        "during": during,
        "after": len(steps),
        "found": int(log.violation_write_index),
        "ring": int(log.violation_ring.abs().sum()),
    }


def _triton(arguments: dict[str, Any]) -> Any:
    """A backend made under these arguments, its rows 100 longer than the context of 64."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=8,
        page_size=1,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=WIDTH,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    backend = stage_backend(pool, arguments=arguments)
    backend.req_to_token = torch.zeros(9, 164, dtype=torch.int32)
    return backend


def sizes(arguments: dict[str, Any], max_bs: int, width: int) -> dict[str, int]:
    """Elements of the buffers that graphs of ``max_bs`` requests get."""
    with configured(**arguments):
        backend = _triton(arguments)
        backend.init_cuda_graph_state(max_bs, max_bs * width)
    return {
        "attn_logits": backend.cuda_graph_attn_logits.shape[0],
        "attn_lse": backend.cuda_graph_attn_lse.shape[0],
        "kv_indices": backend.cuda_graph_kv_indices.numel(),
        "mask": backend.verify_mask.buffer.numel(),
    }


class _Copies(TorchDispatchMode):
    """Counts copies of that many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in str(func) and args[0].numel() == self.size:
            self.count += 1
        return func(*args, **(kwargs or {}))


def mask_copies(own: bool) -> dict[str, Any]:
    """How often a replay copies a mask, the buffer itself (``own``) or another; and the offsets that it computes."""
    arguments = tree(16)
    with configured(**arguments):
        backend = _triton(arguments)
        backend.init_cuda_graph_state(2, 34)
        backend._fill_kv_indptr_and_indices = lambda *_: None
        buffer = backend.verify_mask.buffer
        mask = buffer if own else torch.ones_like(buffer)
        with _Copies(buffer.numel()) as copies:
            given = {"bs": 2, "seq_lens": torch.tensor([5, 9]), "req_pool_indices": torch.tensor([1, 2])}
            verify = SimpleNamespace(draft_token_num=17, num_tokens_per_req=17, custom_mask=mask)
            found = backend._update_target_verify_buffers(**given, spec_info=verify, **here().unplanned())
    return {
        "copies": copies.count,
        "buffer": found[2].data_ptr() == buffer.data_ptr(),
        "ones": int(buffer.sum()) == buffer.numel(),
        "queries": found[0].tolist(),
        "masks": found[3].tolist(),
    }


def split_kv(arguments: dict[str, Any]) -> bool:
    """Whether the backend takes its split-KV verify, on the GPU that has one."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import triton_backend

    kept = triton_backend.is_gfx95_supported
    triton_backend.is_gfx95_supported = lambda: True
    envs.SGLANG_ENABLE_SPLITKV_VERIFY.set(True)
    try:
        return bool(_triton({"speculative_eagle_topk": 1, **arguments}).use_verify_splitkv)
    finally:
        envs.SGLANG_ENABLE_SPLITKV_VERIFY.clear()
        triton_backend.is_gfx95_supported = kept
