"""From the target's logits at every node to the path that each request takes and the tokens it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import sampling as draws
from .request import GREEDY, Sampling
from .walk import accepted_path, rejection_path


class NumericError(RuntimeError):
    """Logits that are not finite: whatever tokens follow would be meaningless."""


@dataclass
class Verified:
    """One request's tree, its root at sequence position `length`, and the output so far, the root's token included."""

    parent: list[int]
    depth: list[int]
    token: list[int]
    length: int = 0
    sampling: Sampling = GREEDY
    output: list[int] = field(default_factory=list)

    def histories(self) -> list[list[int]]:
        """The output before each node's successor: the path's own tokens, not what siblings hold."""
        found = [self.output]
        for node in range(1, len(self.parent)):
            found.append([*found[self.parent[node]], self.token[node]])
        return found


@dataclass(frozen=True)
class Taken:
    """The accepted nodes, root first, and the token that follows each of them (the bonus token last)."""

    path: list[int]
    tokens: list[int]


def choices(logits: Tensor) -> list[int]:
    """Argmax of each row, lowest id first among equals. Raises NumericError."""
    best, choice = logits.max(dim=-1)
    if not bool(best.isfinite().all()):
        raise NumericError("the target's logits are not finite")
    chosen: list[int] = choice.tolist()
    return chosen


def take(logits: Tensor, trees: Sequence[Verified], rejection: bool) -> tuple[list[Taken], Tensor]:
    """What each tree's request takes, and the logits [batch * W, vocab] it was taken from, penalised and tempered.

    logits are the target's, W rows a tree. rejection: the method for requests that sample. Raises NumericError.
    """
    width = logits.shape[0] // len(trees)
    own = list(torch.split(logits, width))
    for i, tree in enumerate(trees):
        if tree.sampling.penalises:
            own[i] = draws.penalised(own[i], tree.histories(), tree.sampling)
        own[i] = draws.tempered(own[i], tree.sampling)
    # Untouched logits stay one tensor: nothing is copied, and a greedy batch is computed as it always was.
    changed = any(tree.sampling.penalises or not tree.sampling.greedy for tree in trees)
    used = torch.cat([scores.float() for scores in own]) if changed else logits
    greedy = choices(used)
    taken = []
    for i, tree in enumerate(trees):
        choice = greedy[i * width : (i + 1) * width]
        if not tree.sampling.greedy:
            weights = draws.filtered(own[i], tree.sampling)
            if rejection:
                taken.append(_reject(tree, weights))
                continue
            choice = draws.draw(weights, tree.sampling.seed, [tree.length + depth for depth in tree.depth])
        path = accepted_path(tree.parent, tree.token, choice)
        taken.append(Taken(path, [choice[node] for node in path]))
    return taken, used


def _reject(tree: Verified, weights: Tensor) -> Taken:
    seed = tree.sampling.seed
    path, left = rejection_path(
        tree.parent,
        tree.token,
        weights.tolist(),
        lambda node, count: draws.coins(seed, tree.length + tree.depth[node], count),
    )
    last = draws.draw(torch.tensor([left], dtype=torch.float64), seed, [tree.length + tree.depth[path[-1]]])
    return Taken(path, [*(tree.token[node] for node in path[1:]), *last])
