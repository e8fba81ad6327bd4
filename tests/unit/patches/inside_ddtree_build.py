"""Inside a tree's Python: DDTREE's trees beside those of the reference engine's heap, and its candidates."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch

from ddtree_ops.engine.tree import best_first

BATCH = 100
KINDS = ("real", "coarse", "few values", "all zero")


def _logprobs(kind: str, levels: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """[BATCH, levels, topk], descending. All but the first kind have many ties, within a node and across levels."""
    shape = (BATCH, levels, topk)
    if kind == "few values":
        values = torch.randint(0, 3, shape, generator=generator) * -0.5
    elif kind == "all zero":
        values = torch.zeros(shape)
    else:
        values = torch.randn(shape, generator=generator) * 3 - 3
        values = values if kind == "real" else (values * 4).round() / 4
    return values.clamp(max=0.0).sort(-1, descending=True).values


def unlike_the_heap(seed: int, cases: int) -> dict[str, Any]:
    """{"cases", "kinds", "wrong": the first tree that is not the heap's, node for node, links and tokens included}."""
    from sglang.srt.speculative import ddtree_build
    from sglang.srt.speculative.ddtree_build import build_trees, node_count

    torch.set_num_threads(1)
    # the interpreter takes many requests in the time of one
    ddtree_build.REQUESTS = 128
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    done, kinds = 0, set()
    while done < cases:
        kind = KINDS[done // BATCH % len(KINDS)]
        block, topk = chosen.choice([2, 3, 4, 8, 16]), chosen.choice([1, 2, 3, 4, 8])
        budget = node_count(block, topk, chosen.choice([1, 2, 3, 7, 8, 16, 31, 63, 64, 65]))
        logprobs = _logprobs(kind, block - 1, topk, generator)
        ids = torch.randperm(logprobs.numel(), generator=generator).view(logprobs.shape)
        trees = build_trees(logprobs, ids, torch.arange(BATCH) - 100, budget)
        for i in range(BATCH):
            heap = best_first(logprobs[i].tolist(), budget)
            got = [a[i].tolist() for a in (trees.parents, trees.ranks, trees.depths)]
            tokens = [i - 100] + [int(ids[i, d - 1, r]) for d, r in zip(heap.depth[1:], heap.rank[1:], strict=True)]
            if got != [heap.parent, heap.rank, heap.depth] or trees.tokens[i].tolist() != tokens:
                return {"cases": done, "wrong": [kind, block, topk, budget, got, vars(heap)]}
            links = _children(trees.next_token[i].tolist(), trees.next_sibling[i].tolist())
            if links != [[c for c in range(1, budget + 1) if heap.parent[c] == p] for p in range(budget + 1)]:
                return {"cases": done, "wrong": [kind, block, topk, budget, links, heap.parent]}
        kinds.add(kind)
        done += BATCH
    ddtree_build.REQUESTS = 1
    return {"cases": done, "kinds": sorted(kinds), "wrong": None}


def _children(first: list[int], after: list[int]) -> list[list[int]]:
    found = []
    for child in first:
        children = []
        while child != -1:
            children.append(child)
            child = after[child]
        found.append(children)
    return found


def nodes_there(block: int, topk: int, budget: int) -> int:
    from sglang.srt.speculative.ddtree_build import node_count

    return int(node_count(block, topk, budget))


def broken_logprobs() -> dict[str, list[list[int]]]:
    """Parents of trees over log-probabilities that a failing drafter may give."""
    from sglang.srt.speculative.ddtree_build import build_trees

    ids = torch.arange(6).view(1, 2, 3)
    cases = {
        "nan": torch.full((1, 2, 3), float("nan")),
        "minus infinity": torch.full((1, 2, 3), float("-inf")),
        "some of both": torch.tensor([[[-0.5, float("nan"), -2.0], [0.0, -1.0, float("-inf")]]]),
    }
    return {name: build_trees(case, ids, torch.tensor([9]), 8).parents.tolist() for name, case in cases.items()}


def candidates_unlike_a_sort(seed: int, vocab: int, topk: int, kind: str) -> str | None:
    """What is wrong with a few rows' candidates, beside a stable sort's: ties by the lower id, and what there is."""
    from sglang.srt.speculative.ddtree_candidates import top_logprobs

    generator = torch.Generator().manual_seed(seed)
    # rows further apart than they are long
    logits = torch.randn(5, vocab + 7, generator=generator)[:, :vocab] * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "gaps":
        logits[0], logits[1, ::2], logits[2, 1:] = float("-inf"), float("-inf"), float("nan")
    values, ids, totals = top_logprobs(logits, topk)
    sane = torch.where(logits.isnan(), float("-inf"), logits)
    best, order = sane.sort(dim=-1, descending=True, stable=True)
    there = min(topk, vocab)
    if ids[:, :there].tolist() != order[:, :there].tolist():
        return f"ids {ids.tolist()} for {order[:, :there].tolist()}"
    if (
        not torch.equal(values[:, :there], best[:, :there].clamp(min=-3e38))
        or (values[:, there:] != float("-inf")).any()
    ):
        return f"values {values.tolist()} for {best[:, :there].tolist()}"
    # no total of nothing at all
    wrong = (totals - sane.logsumexp(-1)).abs()[1:].max() > 1e-5 or totals[0] > best[0].max() + 10
    return f"totals {totals.tolist()} for {sane.logsumexp(-1).tolist()}" if wrong else None


def sampled(seed: int, shards: int, ties: bool) -> dict[str, Any]:
    """The sampler's candidates over a head in one piece and in ``shards``: what each tree holds, and the oracle's.

    ``ties``: small whole numbers as weights, so that logits repeat.
    """
    from sglang.srt.speculative import ddtree_build

    # all requests in one program: the interpreter takes seconds for each
    with mock.patch.object(ddtree_build, "REQUESTS", 4):
        return _sampled(seed, shards, ties)


def _sampled(seed: int, shards: int, ties: bool) -> dict[str, Any]:
    from sglang.srt.speculative.ddtree_sampler import DDTreeDraftSampler

    vocab, hidden, block, bs, topk, budget = 24, 4, 5, 3, 4, 16
    generator = torch.Generator().manual_seed(seed)
    weight, states = (torch.randn(n, hidden, generator=generator) for n in (vocab, bs * block))
    if ties:
        weight, states = weight.round(), states.round()
    ids = torch.arange(bs * block) + 1000

    def sampler(rank: int | None, group: Any) -> Any:
        size = vocab // shards
        part = weight if rank is None else weight[rank * size : (rank + 1) * size]
        return DDTreeDraftSampler(
            weight=torch.cat((part, torch.full((2, hidden), 1e6))),  # rows of padding, never a token
            block_size=block,
            budget=budget,
            topk=topk,
            num_org=part.shape[0],
            org_vocab_start=0 if rank is None else rank * size,
            max_bs=bs + 2,
            tp_group=group,
        )

    whole = sampler(None, None)
    whole(states, ids)
    logits = states.view(bs, block, hidden)[:, 1:] @ weight.T
    values, order = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return {
        "whole": [a.tolist() for a in whole.captured(bs).arrays],
        "oracle": _by_heap(values[..., :topk], order[..., :topk], ids.view(bs, block)[:, 0], budget),
        "ranks": _shards([sampler(rank, _Group(shards)) for rank in range(shards)], states, ids.view(bs, block)[:, 0]),
        "roots": ids.view(bs, block)[:, 0].tolist(),
    }


class _Group:
    """The ranks of one process: what all of them send is noted in a first pass and handed to each in a second."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.sent: list[torch.Tensor] = []
        self.answers: list[torch.Tensor] = []

    def all_gather_into_tensor(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        if self.answers:
            everyone.copy_(self.answers.pop(0))
        else:
            self.sent.append(mine.clone())


def _shards(samplers: list[Any], states: torch.Tensor, bonus: torch.Tensor) -> list[list[list[list[int]]]]:
    """The arrays that each rank's sampler draws."""
    groups = [sampler._tp_group for sampler in samplers]
    for sampler in samplers:
        sampler.draw(states, bonus)
    found = []
    for sampler, group in zip(samplers, groups, strict=True):
        group.answers = [torch.cat(sent) for sent in zip(*(other.sent for other in groups), strict=True)]
        found.append([a.tolist() for a in sampler.draw(states, bonus).arrays])
        assert not group.answers
    return found


def _by_heap(values: torch.Tensor, ids: torch.Tensor, bonus: torch.Tensor, budget: int) -> dict[str, Any]:
    trees = [best_first(rows, budget) for rows in values.tolist()]
    tokens = [
        [int(bonus[i])] + [int(ids[i, d - 1, r]) for d, r in zip(tree.depth[1:], tree.rank[1:], strict=True)]
        for i, tree in enumerate(trees)
    ]
    return {"parents": [tree.parent for tree in trees], "tokens": tokens}
