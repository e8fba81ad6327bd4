"""Attention of a verify by itself: the split kernel beside SGLang's extend kernel, and AR's decode kernel.

    python -m benchmarks.gpu.attention ENGINE OUT [--tune]        (a GPU; ENGINE as tests/gpu/run takes it)

Microseconds a layer in a CUDA graph. The KV pools of several layers take turns, so that no layer finds its keys in the
cache that the layer before filled. ``apart``: the largest difference from dense attention in float32. ``--tune`` tries
tiles and numbers of shares instead of those that ddtree_attention chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu.kit.trees import unpack
from tests.unit.dense_models import attended

LAYERS, LEVELS, REPEATS = 8, 7, 5
HEADS = ((64, 16, 64), (32, 8, 128))
"""(query heads, KV heads, head size): of the padded pair, and of an 8B model as they mostly are."""
LOADS = ((1, 512), (1, 8000), (8, 512), (32, 512), (64, 512))
"""(requests, tokens before each)"""
WIDTHS = (9, 17)
DRAFT = 8
"""A draft's block, which has no mask."""
TILES = tuple((*tile, *how) for tile in itertools.product((64, 128), (32, 64, 128)) for how in ((4, 2), (4, 3), (8, 2)))
"""(rows, columns, warps, stages) that ``--tune`` tries, each with these numbers of shares."""
SHARES = (1, 2, 4, 8, 16, 32)


@dataclass
class Case:
    """A batch's tensors. ``pools``: keys and values of each layer; ``cells``: of the mask, which nodes see which."""

    width: int
    masked: bool
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    pools: list[tuple[Tensor, Tensor]]
    indptr: Tensor
    slots: Tensor
    mask: Tensor
    mask_indptr: Tensor
    cells: Tensor
    prefix: int

    @property
    def bs(self) -> int:
        return self.q.shape[0] // self.width

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def made(heads: tuple[int, int, int], width: int, bs: int, prefix: int, masked: bool, device: str) -> Case:
    from sglang.srt.speculative.ddtree_build import build_trees
    from sglang.srt.speculative.ddtree_mask import cells_of, mask_cells, write_mask

    query_heads, kv_heads, dim = heads
    generator = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    values, ids = drawn(bs, LEVELS, 50).float().log_softmax(-1).topk(4, dim=-1)
    trees = build_trees(values, ids, torch.zeros(bs, dtype=torch.int64, device=device), width - 1)
    lens = torch.full((bs,), prefix, device=device)
    mask = torch.zeros(mask_cells(bs, width, bs * prefix), dtype=torch.uint8, device=device)
    write_mask(mask, trees.parents, lens, LEVELS)
    there = bs * prefix + 16
    return Case(
        width,
        masked,
        drawn(bs * width, query_heads, dim),
        drawn(bs * width, kv_heads, dim),
        drawn(bs * width, kv_heads, dim),
        torch.empty(bs * width, query_heads, dim, dtype=torch.bfloat16, device=device),
        [(drawn(there, kv_heads, dim), drawn(there, kv_heads, dim)) for _ in range(LAYERS)],
        torch.arange(bs + 1, dtype=torch.int32, device=device) * prefix,
        torch.randperm(there - 1, generator=generator, device=device)[: bs * prefix] + 1,
        mask,
        torch.arange(bs + 1, device=device) * width * (prefix + width),
        cells_of(trees.parents, LEVELS),
        prefix,
    )


def dense(case: Case) -> Tensor:
    """Of the first layer's pool, in float32."""
    (pool_k, pool_v), width = case.pools[0], case.width
    result = torch.empty_like(case.o, dtype=torch.float32)
    for i in range(case.bs):
        rows, own = slice(i * width, (i + 1) * width), case.slots[i * case.prefix : (i + 1) * case.prefix]
        keys, values = (torch.cat((pool[own], new[rows])) for pool, new in ((pool_k, case.k), (pool_v, case.v)))
        cells = case.cells[i] if case.masked else torch.ones_like(case.cells[i])
        seen = torch.cat((torch.ones(width, case.prefix, dtype=torch.bool, device=cells.device), cells), dim=1)
        result[rows] = attended(case.q[rows], keys, values, seen)
    return result


def split(case: Case, layer: int, shares: int | None = None) -> None:
    from sglang.srt.speculative.ddtree_attention import split_attention

    masks = (case.mask, case.mask_indptr) if case.masked else (None, None)
    given = (case.q, case.k, case.v, case.o, *case.pools[layer], case.indptr, case.slots, *masks)
    split_attention(*given, case.width, case.scale, shares=shares)


def extend(case: Case, layer: int) -> None:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    starts = torch.arange(case.bs + 1, dtype=torch.int32, device=case.q.device) * case.width
    masks = (case.mask, True, case.mask_indptr) if case.masked else (None, False, None)
    given = (case.q, case.k, case.v, case.o, *case.pools[layer], starts, case.indptr, case.slots)
    extend_attention_fwd(*given, *masks, case.width, 1.0, 1.0, sm_scale=case.scale)


def decode(case: Case) -> Callable[[int], None]:
    """One token a request, as AR has it."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    bs, (heads, dim), splits = case.bs, case.q.shape[1:], 8
    q, o = case.q[:bs].contiguous(), torch.empty_like(case.q[:bs])
    partial = torch.empty(bs, heads, splits, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(bs, heads, splits, dtype=torch.float32, device=q.device)
    counts = torch.full((bs,), splits, dtype=torch.int32, device=q.device)

    def attend(layer: int) -> None:
        given = (q, *case.pools[layer], o, case.indptr, case.slots, partial, sums, counts, splits)
        decode_attention_fwd(*given, case.scale, 1.0, 1.0)

    return attend


def microseconds(attend: Callable[[int], None]) -> float:
    """The median of REPEATS replays of a graph of LAYERS calls, each timed by events, a layer."""
    attend(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            attend(layer)
    took = []
    for _ in range(REPEATS + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(4):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        took.append(begun.elapsed_time(ended) * 1000 / (4 * LAYERS))
    return sorted(took[1:])[REPEATS // 2]


def cases(device: str) -> Iterator[tuple[str, Case]]:
    for heads, (bs, prefix) in itertools.product(HEADS, LOADS):
        for width in (*WIDTHS, DRAFT):
            name = f"{heads[0]}/{heads[1]}x{heads[2]} C={bs} at {prefix} {'W' if width != DRAFT else 'draft '}{width}"
            yield name, made(heads, width, bs, prefix, width != DRAFT, device)


def compare(device: str) -> Iterator[str]:
    yield f"{'':<32}{'decode':>9}{'extend':>9}{'split':>9}{'x decode':>9}  apart"
    for name, case in cases(device):
        split(case, 0)
        apart = float((dense(case) - case.o.float()).abs().max())
        ar, stock, mine = (
            microseconds(attend)
            for attend in (decode(case), lambda layer, c=case: extend(c, layer), lambda layer, c=case: split(c, layer))
        )
        yield f"{name:<32}{ar:9.1f}{stock:9.1f}{mine:9.1f}{mine / ar:9.2f}  {apart:.4f}"


def set_tiles(tile: tuple[int, ...]) -> None:
    from sglang.srt.speculative import ddtree_attention

    ddtree_attention.tiles_of = lambda *_: ddtree_attention.Tiles(*tile)


def compiled(of: tuple[str, tuple[int, ...], tuple[int, int, int]]) -> None:
    """In a process of its own: compilations wait for one core each."""
    site, tile, heads = of
    sys.path[:0] = site.split(":")
    set_tiles(tile)
    with contextlib.suppress(Exception):
        for masked, shares in itertools.product((True, False), (1, 2)):
            split(made(heads, DRAFT, 1, 64, masked, "cuda"), 0, shares)


def tune(site: str, device: str) -> Iterator[str]:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(compiled, itertools.product((site,), TILES, HEADS), chunksize=1)
    for name, case in cases(device):
        found: list[tuple[float, Any]] = []
        for tile in TILES:
            set_tiles(tile)
            for shares in SHARES:
                try:
                    found.append((microseconds(lambda layer, c=case, s=shares: split(c, layer, s)), (*tile, shares)))
                except Exception as error:
                    found.append((float("inf"), (*tile, shares, repr(error)[:60])))
        found.sort(key=lambda one: one[0])
        yield f"{name}: " + "  ".join(f"{took:.1f} {how}" for took, how in found[:6])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        site = unpack(args.engine, Path(work)).patched
        sys.path[:0] = site.split(":")
        args.out.mkdir(parents=True, exist_ok=True)
        file = args.out / ("tuned.txt" if args.tune else "attention.txt")
        with file.open("w") as out:
            head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16; microseconds a layer"
            for line in itertools.chain([head], tune(site, "cuda") if args.tune else compare("cuda")):
                print(line, flush=True)
                out.write(line + "\n")
                out.flush()


if __name__ == "__main__":
    main()
