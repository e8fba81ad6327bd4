"""Inside a tree's Python with Triton's interpreter: DDTREE's kernels beside plain forms and the reference engine's."""

from __future__ import annotations

from typing import Any

import torch

from ddtree_ops.engine.walk import accepted_path
from tests.unit.dense_models import attended

LEVELS = 7


def _trees(seed: int, bs: int, width: int, vocab: int) -> Any:
    """Real trees, of blocks of LEVELS + 1 with four candidates a position, distinct within it."""
    from sglang.srt.speculative.ddtree_build import build_trees

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, LEVELS, vocab, generator=generator) * 2
    values, ids = logits.log_softmax(-1).topk(4, dim=-1)
    return build_trees(values, ids, torch.randint(0, vocab, (bs,), generator=generator), width - 1)


def mask_faults(seed: int, width: int, prefixes: list[int]) -> list[str]:
    """What is wrong with the mask of such a batch; empty when all is well."""
    from sglang.srt.speculative.ddtree_mask import cells_of, mask_cells, read_mask, write_mask

    bs = len(prefixes)
    parents = _trees(seed, bs, width, 50).parents
    size = mask_cells(bs, width, sum(prefixes))
    # bytes that nobody may touch, the tail behind the last request among them
    before = torch.full((size + 100,), 7, dtype=torch.uint8)
    buffer = before.clone()
    write_mask(buffer, parents, torch.tensor(prefixes), LEVELS)
    found = read_mask(buffer, prefixes, width)
    wanted = torch.zeros_like(found)
    for i in range(bs):
        for node in range(width):
            seen = node
            while True:
                wanted[i, node, seen] = True
                if seen == 0:
                    break
                seen = int(parents[i, seen])
    faults = [] if bool((found == wanted).all()) else ["cells"]
    faults += [] if bool((cells_of(parents, LEVELS) == wanted).all()) else ["plain form"]
    touched = int((buffer != before).sum())
    faults += [] if touched == bs * width * width else [f"{touched} bytes touched"]
    return faults


def walks_unlike_the_reference(seed: int, width: int, cases: int) -> dict[str, Any]:
    """Walks over random trees whose target often agrees: {"longest", "wrong": the first unlike the reference's}."""
    from sglang.srt.speculative.ddtree_verify import check_accepted, path_rows, walk

    bs, vocab, longest = 4, 6, 0
    for case in range(cases):
        trees = _trees(seed + case, bs, width, vocab)
        generator = torch.Generator().manual_seed(seed + case)
        target = torch.randint(0, vocab, (bs, width), generator=generator)
        # a target that follows the first child three times in four
        first = trees.tokens.gather(1, trees.next_token.clamp(min=0))
        target = torch.where(torch.rand(bs, width, generator=generator) < 0.75, first, target)
        got = walk(trees.tokens, trees.next_token, trees.next_sibling, target, LEVELS + 1)
        check_accepted(got, trees.depths, LEVELS + 1)
        for i in range(bs):
            path = accepted_path(trees.parents[i].tolist(), trees.tokens[i].tolist(), target[i].tolist())
            longest = max(longest, len(path))
            length = int(got.commit_lens[i])
            wanted = (path, [int(target[i, node]) for node in path], int(target[i, path[-1]]))
            mine = (got.path[i, :length].tolist(), got.tokens[i, :length].tolist(), int(got.bonus[i]))
            rows = path_rows(got, width)[i, :length].tolist()
            if mine != wanted or rows != [i * width + node for node in path]:
                return {"longest": longest, "wrong": [case, i, mine, wanted]}
    return {"longest": longest, "wrong": None}


def moved(paths: list[list[int]], width: int, latent: bool) -> list[str]:
    """What is wrong after the KV of these paths was moved; empty when all is well. Sources and targets overlap."""
    from sglang.srt.speculative.ddtree_verify import Accepted, PathMover

    bs, block, slots_there = len(paths), LEVELS + 1, 200
    generator = torch.Generator().manual_seed(len(paths))
    # rows of several sizes, one of them longer than a tile and no multiple of it
    shapes = [(1, 300)] * 3 if latent else [(2, 8), (2, 8), (3, 70)]
    buffers = [torch.randn(slots_there, *shape, generator=generator) for shape in shapes]
    buffers[1] = buffers[1].to(torch.bfloat16)
    before = [buffer.clone() for buffer in buffers]
    slots = torch.randperm(slots_there - 1, generator=generator)[: bs * width].view(bs, width) + 1
    path = torch.tensor([p + [0] * (block - len(p)) for p in paths])
    lens = torch.tensor([len(p) for p in paths], dtype=torch.int32)
    PathMover(buffers).move(slots, Accepted(path, lens, path, path[:, 0]))
    faults = []
    for number, (now, old) in enumerate(zip(buffers, before, strict=True)):
        wanted = old.clone()
        for i, nodes in enumerate(paths):
            for place, node in enumerate(nodes):
                wanted[slots[i, place]] = old[slots[i, node]]
        if not torch.equal(now, wanted):
            faults.append(f"buffer {number}")
    return faults


def refused_buffer() -> None:
    from sglang.srt.speculative.ddtree_verify import PathMover

    PathMover([torch.zeros(4, 6, 3).transpose(1, 2)])


def split_apart(
    seed: int, width: int, prefixes: list[int], heads: int, kv_heads: int, dim: int, shares: int, more: dict[str, Any]
) -> float:
    """How far ddtree_attention is from dense attention. more: ``masked`` (default: True), ``cap``, ``half``."""
    from sglang.srt.speculative.ddtree_attention import split_attention
    from sglang.srt.speculative.ddtree_mask import cells_of, mask_cells, write_mask

    bs, generator = len(prefixes), torch.Generator().manual_seed(seed)
    # the interpreter multiplies bfloat16 as if it were integers
    dtype = torch.float16 if more.get("half") else torch.float32
    parents, lens = _trees(seed, bs, width, 50).parents, torch.tensor(prefixes)
    mask = torch.zeros(mask_cells(bs, width, sum(prefixes)), dtype=torch.uint8)
    write_mask(mask, parents, lens, LEVELS)

    def drawn(rows: int, of: int) -> torch.Tensor:
        return torch.randn(rows, of, dim, generator=generator).to(dtype)

    q, k, v = drawn(bs * width, heads), drawn(bs * width, kv_heads), drawn(bs * width, kv_heads)
    pool_k, pool_v = drawn(sum(prefixes) + 9, kv_heads), drawn(sum(prefixes) + 9, kv_heads)
    slots = torch.randperm(sum(prefixes) + 9, generator=generator)[: sum(prefixes)]
    indptr = torch.cat((torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()))
    mask_indptr = torch.cat((torch.zeros(1, dtype=torch.int64), (width * (lens + width)).cumsum(0)))
    masked, cap = more.get("masked", True), more.get("cap", 0.0)
    out = torch.full_like(q, 7.0)
    masks = (mask, mask_indptr) if masked else (None, None)
    split_attention(q, k, v, out, pool_k, pool_v, indptr, slots, *masks, width, dim**-0.5, cap, shares)
    cells = cells_of(parents, LEVELS) if masked else torch.ones(bs, width, width, dtype=torch.bool)
    apart = 0.0
    for i, prefix in enumerate(prefixes):
        rows, own = slice(i * width, (i + 1) * width), slots[int(indptr[i]) : int(indptr[i + 1])]
        keys, values = (torch.cat((pool[own], new[rows])) for pool, new in ((pool_k, k), (pool_v, v)))
        seen = torch.cat((torch.ones(width, prefix).bool(), cells[i]), dim=1)
        apart = max(apart, float((attended(q[rows], keys, values, seen, cap) - out[rows].float()).abs().max()))
    return apart


def attention_apart(
    seed: int, width: int, prefixes: list[int], keys: int = 16, latents: int | None = None, page: int = 1
) -> dict[str, float]:
    """Of SGLang's extend attention under a written mask: the distance from dense attention under the trees, and how far
    causal attention would be from it. keys: size of a key. latents: the values are the keys' first so many. page:
    tokens of a page of KV."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.srt.speculative.ddtree_mask import cells_of, mask_cells, write_mask

    heads, dim, bs, there = 2, keys, len(prefixes), -(-(sum(prefixes) + 9) // page) * page
    generator = torch.Generator().manual_seed(seed)
    parents = _trees(seed, bs, width, 50).parents
    lens = torch.tensor(prefixes)
    # what is not written must not be read: the prefix's part of the mask says that nothing may be seen
    mask = torch.zeros(mask_cells(bs, width, sum(prefixes)), dtype=torch.uint8)
    write_mask(mask, parents, lens, LEVELS)
    q = torch.randn(bs * width, heads, dim, generator=generator)
    k, v = (torch.randn(bs * width, 1, dim, generator=generator) for _ in range(2))
    pool_k, pool_v = (torch.randn(there, 1, dim, generator=generator) for _ in range(2))
    if latents is not None:
        v, pool_v = k[..., :latents].contiguous(), pool_k[..., :latents]
    slots = torch.randperm(there, generator=generator)[: sum(prefixes)]
    out = torch.zeros(bs * width, heads, v.shape[-1])
    indptr = torch.cat((torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()))
    mask_indptr = torch.cat((torch.zeros(1, dtype=torch.int64), (width * (lens + width)).cumsum(0)))
    queries = torch.arange(0, (bs + 1) * width, width, dtype=torch.int32)
    given = (q, k, v, out, pool_k, pool_v, queries, indptr, slots, mask, True, mask_indptr, width, 1.0, 1.0)
    extend_attention_fwd(*given, dim**-0.5, page_size=page)
    cells, causal = cells_of(parents, LEVELS), torch.ones(width, width).tril().bool()
    apart, as_chain = 0.0, 0.0
    for i, prefix in enumerate(prefixes):
        rows, own = slice(i * width, (i + 1) * width), slots[int(indptr[i]) : int(indptr[i + 1])]
        keys, values = (torch.cat((pool[own], new[rows])) for pool, new in ((pool_k, k), (pool_v, v)))
        for name, tree in (("tree", cells[i]), ("chain", causal)):
            seen = torch.cat((torch.ones(width, prefix).bool(), tree), dim=1)
            far = float((attended(q[rows], keys, values, seen) - out[rows]).abs().max())
            apart, as_chain = (max(apart, far), as_chain) if name == "tree" else (apart, max(as_chain, far))
    return {"apart": apart, "as_chain": as_chain}
