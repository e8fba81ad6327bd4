"""A program: compiles DDTREE's Triton kernels for one GPU that is not there.

Prints a line each: kernel, bytes of machine code, bytes of shared memory.

usage: python compile_kernels.py OVERLAY SM        without SGLang; Triton and torch importable
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

WIDTHS = ((2, 1), (17, 7), (65, 15))
"""(W, levels)"""


def module(overlay: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, overlay / f"sglang/srt/speculative/{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


SHAPES = ((128, "bf16"), (256, "bf16"), (128, "fp32"))
"""(head size, type) of the attention, which takes a quarter of a minute to compile."""


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], sm: int, **options: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = [*types, *constants]
    source = ASTSource(
        fn=kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    print(kernel.fn.__name__, len(made.asm["cubin"]), made.metadata.shared)


def main(overlay: Path, sm: int) -> None:
    from triton import next_power_of_2

    mask, verify = module(overlay, "ddtree_mask"), module(overlay, "ddtree_verify")
    attention = module(overlay, "ddtree_attention")
    pointers = {"mask_ptr": "*u8", "parents_ptr": "*i64", "seq_lens_ptr": "*i64"}
    for width, levels in WIDTHS:
        constants = {"LEVELS": levels, "BLOCK_W": next_power_of_2(width), "BLOCK_BS": 8}
        compiled(mask._write_cells, {**pointers, "parents_stride": "i32", "width": "i32"}, constants, sm)
    pointers = {"data_ptrs": "*u64", "row_bytes_ptr": "*i64", "slots_ptr": "*i64", "path_ptr": "*i64"}
    types = {**pointers, "commit_lens_ptr": "*i32", "slots_stride": "i32", "path_stride": "i32"}
    compiled(verify._move_path, types, {"TILE": verify.TILE_BYTES}, sm)
    draft(module(overlay, "ddtree_candidates"), module(overlay, "ddtree_build"), sm)
    for head_dim, name in SHAPES:
        attend(attention, WIDTHS[-1][0], head_dim, name, sm)


def draft(candidates: ModuleType, build: ModuleType, sm: int) -> None:
    """A vocabulary of 38 chunks, 8 candidates, a tree of 64."""
    of_chunk = {"values_ptr": "*fp32", "ids_ptr": "*i32", "tops_ptr": "*fp32", "sums_ptr": "*fp32"}
    counts = {"row_stride": "i32", "vocabulary": "i32", "chunks": "i32", "topk": "i32"}
    compiled(candidates._best_of_chunk, {"logits_ptr": "*bf16", **of_chunk, **counts}, {"CHUNK": candidates.CHUNK}, sm)
    of_row = {"best_ptr": "*fp32", "best_ids_ptr": "*i64", "totals_ptr": "*fp32", "chunks": "i32", "topk": "i32"}
    compiled(candidates._best_of_row, {**of_chunk, **of_row}, {"CHUNKS": 64, "BLOCK": 512}, sm, num_warps=1)
    arrays = ("parents", "depths", "ranks", "next_token", "next_sibling", "tokens")
    pointers = {"logprobs_ptr": "*fp32", **dict.fromkeys((f"{n}_ptr" for n in ("ids", "bonus", *arrays)), "*i64")}
    counts = dict.fromkeys(("bonus_stride", "bs", "levels", "topk", "budget"), "i32")
    compiled(build._grow, {**pointers, **counts}, {"BLOCK_BS": 1, "BLOCK_W": 128}, sm, num_warps=1)


def attend(attention: ModuleType, width: int, head_dim: int, name: str, sm: int) -> None:
    """Four query heads a KV head, under a mask, with capped scores: the most that the kernel does."""
    from triton import next_power_of_2

    tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "pool_k_ptr", "pool_v_ptr"), f"*{name}")
    results = {"out_ptr": "*fp32", "log_sum_ptr": "*fp32"}
    written = {**results, "o_ptr": f"*{name}"}
    places = {"kv_indptr_ptr": "*i32", "kv_indices_ptr": "*i64", "mask_ptr": "*u8", "mask_indptr_ptr": "*i64"}
    numbers = {"scale": "fp32", "cap": "fp32"}
    strides = [f"{of}_{by}" for of in ("o", "q", "k", "v", "pool_k", "pool_v") for by in ("row", "head")]
    counts = dict.fromkeys([*strides, "width", "shares", "kv_heads"], "i32")
    block = {"DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim)}
    types = {**tensors, **written, **places, **numbers, **counts}
    for split in (True, False):
        tiles = attention.tiles_of(4 * width, head_dim, 2 if name == "bf16" else 4, split)
        constants = {"GROUP": 4, **block, "ROWS": tiles.rows, "COLUMNS": tiles.columns}
        constants |= {"MASKED": True, "CAPPED": True, "SPLIT": split, "LEAST": attention.MIN_KEYS}
        compiled(attention._attend_share, types, constants, sm, num_warps=tiles.warps, num_stages=tiles.stages)
    types = written | dict.fromkeys(("o_row", "o_head", "width", "heads", "parts"), "i32")
    compiled(attention._merge_shares, types, {**block, "PARTS": 32}, sm, num_warps=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
