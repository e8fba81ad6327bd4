"""A program: compiles DDTREE's Triton kernels for one GPU that is not there, and prints the sizes of what came out.

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


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, int], sm: int) -> int:
    """Bytes of the machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = [*types, *constants]
    source = ASTSource(
        fn=kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return len(compile(source, target=GPUTarget("cuda", sm, 32)).asm["cubin"])


def main(overlay: Path, sm: int) -> None:
    from triton import next_power_of_2

    mask, verify = module(overlay, "ddtree_mask"), module(overlay, "ddtree_verify")
    pointers = {"mask_ptr": "*u8", "parents_ptr": "*i64", "seq_lens_ptr": "*i64"}
    for width, levels in WIDTHS:
        constants = {"LEVELS": levels, "BLOCK_W": next_power_of_2(width), "BLOCK_BS": 8}
        print(compiled(mask._write_cells, {**pointers, "parents_stride": "i32", "width": "i32"}, constants, sm))
    pointers = {"data_ptrs": "*u64", "row_bytes_ptr": "*i64", "slots_ptr": "*i64", "path_ptr": "*i64"}
    types = {**pointers, "commit_lens_ptr": "*i32", "slots_stride": "i32", "path_stride": "i32"}
    print(compiled(verify._move_path, types, {"TILE": verify.TILE_BYTES}, sm))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
