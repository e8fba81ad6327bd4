"""Inside a tree's Python with Triton's interpreter: DDTREE's kernels beside plain forms and the reference engine's."""

from __future__ import annotations

from typing import Any

import torch

from ddtree_ops.engine.walk import accepted_path

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
