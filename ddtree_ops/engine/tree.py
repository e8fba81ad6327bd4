"""DDTree: the best-first tree over a drafter's per-position log-probabilities (arXiv 2604.12989).

A DFlash drafter predicts each position independently of the others, so a path's log-probability is the sum of one
entry a position and every path shares the same candidates at a depth. The heap yields the `budget` most probable
prefixes; because log p <= 0 a parent always precedes its children, hence parent index < child index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tree:
    """A tree of W nodes, node 0 the root (the bonus token): parent[0] = 0, rank[0] = -1, depth[0] = 0."""

    parent: list[int]
    rank: list[int]
    depth: list[int]


def best_first(logprobs: Sequence[Sequence[float]], budget: int) -> Tree:
    """The tree of at most `budget` nodes besides the root.

    logprobs[d][r] is the log-probability of the rank-r candidate at depth d + 1, descending in r. Order, and so the
    tie rule: higher sum along the path first, then lower parent index, then lower rank. The tree is smaller only
    when no further path exists. Raises ValueError for values that are not finite, positive, or not descending.
    """
    for row in logprobs:
        if not row or not all(0.0 >= a >= b > float("-inf") for a, b in zip(row, [*row[1:], row[-1]], strict=True)):
            raise ValueError(f"draft log-probabilities must be finite, <= 0 and descending, got {list(row)[:8]}")
    parents, ranks, depths, scores = [0], [-1], [0], [0.0]
    heap = [(-logprobs[0][0], 0, 0, 1)] if logprobs else []
    while heap and len(parents) <= budget:
        cost, parent, rank, depth = heappop(heap)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depth)
        scores.append(-cost)
        row = logprobs[depth - 1]
        if rank + 1 < len(row):
            heappush(heap, (-(scores[parent] + row[rank + 1]), parent, rank + 1, depth))
        if depth < len(logprobs):
            heappush(heap, (-(scores[node] + logprobs[depth][0]), node, 0, depth + 1))
    return Tree(parents, ranks, depths)


def chain(length: int) -> Tree:
    """DFlash's linear draft as a tree: each node the only child of the one before."""
    return Tree([0, *range(length)], [-1] + [0] * length, list(range(length + 1)))


def tree_width(depth: int, topk: int, budget: int) -> int:
    """W: nodes of a best-first tree, root included; below budget + 1 only where fewer paths exist."""
    paths = 0
    for level in range(1, depth + 1):
        paths += topk**level
        if paths >= budget:
            return budget + 1
    return paths + 1


@dataclass(frozen=True)
class Shape:
    """What a step really executed: nodes besides the root, the most children of one node, the deepest path.

    Siblings that hold the same token count once: the second one could never be accepted.
    """

    nodes: int
    max_children: int
    max_depth: int


def shape_of(parent: NDArray[np.int64], depth: NDArray[np.int64], token: NDArray[np.int64]) -> Shape:
    """The largest figures over a batch of trees, each array [batch, W], measured on what the verify used."""
    nodes = children = 0
    for parents, tokens in zip(parent[:, 1:].tolist(), token[:, 1:].tolist(), strict=True):
        distinct = set(zip(parents, tokens, strict=True))
        nodes = max(nodes, len(distinct))
        children = max(children, *Counter(node for node, _ in distinct).values(), 0)
    return Shape(nodes, children, int(depth.max()))
