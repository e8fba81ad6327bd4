"""Inside the patched tree's Python, with Triton and no card: SGLang's and DDTREE's own launches, compiled, not run.

The functions that launch are called as the server calls them, with tensors of a server's shapes and types, so block
sizes, warps and stages are what they choose for the card. Which ones: those that the compile caches of real runs hold
(results/gpu), and what such runs did not need (MLA, pages, a sharded embedding).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.unit.patches.configured import configured

HEADS, KV_HEADS, BS, WIDTH, BLOCK, CONTEXT = 16, 4, 2, 65, 8, 256
TOPK, VOCABULARY = 8, 151_936
"""WIDTH: 64/8, the widest tree that was run; more rows than any tile has."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES: tuple[tuple[int, int, str], ...] = (
    *((size, size, "bf16") for size in (64, 128, 192, 256)),
    *((size, size, "fp32") for size in (64, 128)),
    # MLA: absorbed in the verify and the decode, plain in a prefill
    (576, 512, "bf16"),
    (192, 128, "bf16"),
)
"""(query and key head, value head, type)"""
SETS: dict[str, tuple[tuple[int, int, str], ...]] = {
    "all": SIZES,
    "few": ((128, 128, "bf16"), (576, 512, "bf16")),
}
"""What there is to compile: a name -> head sizes."""

Row = dict[str, Any]
_USED = re.compile(r"REG:(\d+) STACK:(\d+) ")


class _Card:
    """Triton's driver of a card that is not there. ``sm`` is also the device's number: kernels are kept by it.

    0 while SGLang is imported: modules that nobody launches anything of ask torch for what this card is called.
    """

    sm = 0

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda" if self.sm else "cpu", self.sm, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., float]:
        raise RuntimeError("a kernel that tunes itself needs the card")


def compiled(sm: int, which: str) -> list[Row]:
    """A row for each kernel and set of constants that one card would get. which: of SETS.

    {"kernel", "what": of which step, "heads": "query/value type" or "", "registers" of a thread, "stack": its bytes in
    local memory, "shared" bytes of a program, "warps", "bytes" of machine code}.
    """
    import triton
    from triton import knobs
    from triton.runtime.jit import JITFunction

    card = _Card()
    triton.runtime.driver.set_active(card)
    # as a float32 server sets it (06-fp32-arithmetic)
    knobs.language.fp32_default = "ieee"
    rows: list[Row] = []
    seen: set[int] = set()
    what = ["", ""]
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) in seen:
            return kernel
        seen.add(id(kernel))
        registers, stack = _resources(kernel.asm["cubin"])
        rows.append(
            {
                "kernel": self.__name__,
                "what": what[0],
                "heads": what[1],
                "registers": registers,
                "stack": stack,
                "shared": kernel.metadata.shared,
                "warps": kernel.metadata.num_warps,
                "bytes": len(kernel.asm["cubin"]),
            }
        )
        kept.append(kernel)
        return kernel

    kept: list[Any] = []
    with configured(), torch.inference_mode(), _as_on(sm), mock.patch.object(JITFunction, "run", compile_only):
        launches = list(_launches(SETS[which]))
        card.sm = sm
        for what[0], what[1], launch in launches:
            launch()
    return rows


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, by the cuobjdump that Triton brings along."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USED.search(told)
    assert found, told
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def _as_on(sm: int) -> Iterator[None]:
    """What SGLang has asked the card at import, and asks it again."""
    from sglang.kernels.ops.attention import extend_attention
    from sglang.kernels.ops.kvcache import mla_buffer

    capability = divmod(sm, 10)
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (extend_attention, "_is_cuda", True),
            (extend_attention, "CUDA_CAPABILITY", capability),
            (mla_buffer, "is_arch_support_pdl", lambda: True),
        ):
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        yield


def _launches(sizes: Sequence[tuple[int, int, str]]) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(of which step, heads, what launches)"""
    for q_dim, v_dim, name in sizes:
        heads = f"{q_dim}/{v_dim} {name}"
        shape = _Shape(q_dim, v_dim, DTYPES[name])
        yield "verify", heads, lambda shape=shape: shape.extend(WIDTH, causal=True, masked=True)
        own = not shape.mla and q_dim == v_dim
        for shares, how in ((15, "prefix split"), (1, "prefix whole")) if own else ():
            yield f"verify, {how}", heads, lambda shape=shape, n=shares: shape.split(WIDTH, n, masked=True)
        # Of float32 the largest alone: IEEE dots take the compiler minutes.
        if name != "fp32":
            yield "prefill", heads, lambda shape=shape: shape.extend(CONTEXT, causal=True, masked=False)
        if name != "fp32" and own:
            yield "draft", heads, lambda shape=shape: shape.extend(BLOCK, causal=False, masked=False)
            for shares, how in ((15, "prefix split"), (1, "prefix whole")):
                yield f"verify of 9, {how}", heads, lambda shape=shape, n=shares: shape.split(9, n, masked=True)
                yield f"draft, {how}", heads, lambda shape=shape, n=shares: shape.split(BLOCK, n, masked=False)
        if q_dim != 192 or v_dim == 192:
            yield "decode (AR)", heads, shape.decode
        if not shape.mla:
            yield "drafter's KV", heads, shape.drafters_kv
    yield from _without_heads()


class _Shape:
    """Queries, keys and a pool of one head size. MLA has one KV head."""

    def __init__(self, q_dim: int, v_dim: int, dtype: torch.dtype) -> None:
        self.q_dim, self.v_dim, self.dtype, self.mla = q_dim, v_dim, dtype, q_dim == 576
        self.kv_heads = 1 if self.mla else KV_HEADS
        self.pool_k = torch.zeros(CONTEXT, self.kv_heads, q_dim, dtype=dtype)
        self.pool_v = self.pool_k[..., :v_dim] if self.mla else torch.zeros(CONTEXT, self.kv_heads, v_dim, dtype=dtype)
        self.indptr = torch.zeros(BS + 1, dtype=torch.int32)
        self.indices = torch.zeros(CONTEXT, dtype=torch.int64)

    def _rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, o"""
        sizes = ((HEADS, self.q_dim), (self.kv_heads, self.q_dim), (self.kv_heads, self.v_dim), (HEADS, self.v_dim))
        return tuple(torch.zeros(count, heads, dim, dtype=self.dtype) for heads, dim in sizes)

    def extend(self, width: int, causal: bool, masked: bool) -> None:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        mask = torch.zeros(BS * width * CONTEXT, dtype=torch.uint8) if masked else None
        extend_attention_fwd(
            *(*self._rows(BS * width), self.pool_k, self.pool_v, self.indptr, self.indptr, self.indices),
            *(mask, causal, torch.zeros(BS + 1, dtype=torch.int64) if masked else None, width, 1.0, 1.0),
            sm_scale=self.q_dim**-0.5,
        )

    def split(self, width: int, shares: int, masked: bool) -> None:
        """By DDTREE's own kernels."""
        from sglang.srt.speculative.ddtree_attention import split_attention

        mask = torch.zeros(BS * width * CONTEXT, dtype=torch.uint8) if masked else None
        split_attention(
            *(*self._rows(BS * width), self.pool_k, self.pool_v, self.indptr, self.indices),
            *(mask, torch.zeros(BS + 1, dtype=torch.int64) if masked else None),
            width=width,
            scale=self.q_dim**-0.5,
            # capped scores: the most that the kernel does
            cap=50.0 if masked else 0.0,
            shares=shares,
        )

    def decode(self) -> None:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

        splits = 8
        q, _, _, o = self._rows(BS)
        decode_attention_fwd(
            *(q, self.pool_k, self.pool_v, o, self.indptr, self.indices),
            torch.zeros(BS, HEADS, splits, self.v_dim),
            torch.zeros(BS, HEADS, splits),
            torch.zeros(BS, dtype=torch.int32),
            *(splits, self.q_dim**-0.5, 1.0, 1.0),
            has_mla=self.mla,
        )

    def drafters_kv(self) -> None:
        from sglang.kernels.ops.speculative.fused_kv_materialize import _fused_norm_rope_stacked
        from sglang.srt.mem_cache.memory_pool import _set_kv_buffer_prefix_valid_impl

        layers, count = 3, BS * BLOCK
        _fused_norm_rope_stacked(
            torch.zeros(count, layers, 2 * KV_HEADS * self.v_dim, dtype=self.dtype),
            torch.zeros(layers, self.v_dim, dtype=self.dtype),
            torch.zeros(layers),
            torch.zeros(CONTEXT, self.v_dim),
            torch.zeros(count, dtype=torch.int64),
            *(KV_HEADS, self.v_dim, self.v_dim),
        )
        rows = torch.zeros(count, KV_HEADS, self.v_dim, dtype=self.dtype)
        pool = torch.zeros(CONTEXT, KV_HEADS, self.v_dim, dtype=self.dtype)
        _set_kv_buffer_prefix_valid_impl(
            *(rows, rows, pool, pool, torch.zeros(BS, BLOCK, dtype=torch.int64), torch.zeros(BS, dtype=torch.int32)),
            *(KV_HEADS * self.v_dim, self.dtype),
        )


def _without_heads() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """What knows no head size."""
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    from sglang.kernels.ops.attention.position import compute_position_triton
    from sglang.kernels.ops.embeddings.vocab_parallel_embedding import _vocab_parallel_embedding_kernel
    from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled
    from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton
    from sglang.kernels.ops.memory.common import get_last_loc_triton, write_req_to_token_pool_triton
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
    from sglang.kernels.ops.speculative import dflash
    from sglang.srt.mem_cache.allocation import assign_req_to_token_pool
    from sglang.srt.speculative.ddtree_build import build_trees
    from sglang.srt.speculative.ddtree_candidates import top_logprobs
    from sglang.srt.speculative.ddtree_mask import write_mask
    from sglang.srt.speculative.ddtree_verify import PathMover

    long, short = (torch.zeros(BS, dtype=dtype) for dtype in (torch.int64, torch.int32))
    table = torch.zeros(4, CONTEXT, dtype=torch.int32)
    block = torch.zeros(BS, BLOCK, dtype=torch.int64)
    wide = torch.zeros(BS, WIDTH, dtype=torch.int64)
    rows = torch.zeros(CONTEXT, 1, 576, dtype=torch.bfloat16)
    path = SimpleNamespace(path=block, commit_lens=short)
    indptr = torch.zeros(BS + 1, dtype=torch.int32)
    best = torch.zeros(BS, BLOCK - 1, TOPK)
    yield "draft", "", lambda: top_logprobs(torch.zeros(BS * (BLOCK - 1), VOCABULARY, dtype=torch.bfloat16), TOPK)
    yield "draft", "", lambda: build_trees(best, best.long(), long, WIDTH - 1)
    yield "tree", "", lambda: write_mask(torch.zeros(9, dtype=torch.uint8), wide, long, BLOCK - 1)
    yield "tree", "", lambda: PathMover([rows, rows]).move(wide, path)  # type: ignore[arg-type]
    yield (
        "draft",
        "",
        lambda: dflash._prepare_dflash_draft_block_unchecked(long, long, long, table, block, block, block, 1),
    )
    yield (
        "chain's accept",
        "",
        lambda: dflash._compute_dflash_accept_bonus_triton_unchecked(
            block, block, short, short, long, block, long, long
        ),
    )
    yield (
        "KV slots",
        "",
        lambda: create_flashinfer_kv_indices_triton[(BS,)](table, long, long, indptr, None, wide, table.stride(0)),
    )
    yield (
        "KV slots",
        "",
        lambda: get_num_kv_splits_triton[(1,)](short, long, BS, 1, HEADS, KV_HEADS, 8, 132, MAX_NUM_SEQ=256),
    )
    yield "KV slots", "", lambda: get_last_loc_triton(table, long, long)
    yield (
        "KV slots",
        "",
        lambda: write_req_to_token_pool_triton[(BS,)](table, long, long, long, long, long, long, table.shape[1]),
    )
    yield (
        "KV slots",
        "",
        lambda: assign_req_to_token_pool[(BS,)](long, table, long, long, long, table.shape[1], BS),
    )
    yield "prefill", "", lambda: compute_position_triton(long, long, CONTEXT)
    yield (
        "KV moved",
        "",
        lambda: copy_all_layer_kv_cache_tiled[(2, 1)](
            *(long.to(torch.uint64), long, long, long, BS, BS), BYTES_PER_TILE=512, num_warps=8, num_stages=2
        ),
    )
    yield "MLA's KV", "", lambda: set_mla_kv_buffer_triton(rows[:, 0], long, rows[:BS, 0, :512], rows[:BS, 0, 512:])
    yield "seeds", "", lambda: murmur_hash32(long, long, wide[0])
    yield "embedding of a rank", "", lambda: _embed(_vocab_parallel_embedding_kernel, long)


def _embed(kernel: Any, ids: torch.Tensor) -> None:
    weight = torch.zeros(32, 1024, dtype=torch.bfloat16)
    out = torch.zeros(BS, 1024, dtype=torch.bfloat16)
    kernel[(BS, 1)](ids, weight, out, 1024, weight.stride(0), 0, 32, 0, 32, 32, BLOCK_H=1024, num_warps=8)
