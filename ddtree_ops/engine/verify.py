"""From the target's logits at every node to the path that each request takes and the tokens it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import planted
from . import sampling as draws
from .faults import Fault
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


def take(
    logits: Tensor, trees: Sequence[Verified], rejection: bool = False, fault: Fault | None = None
) -> tuple[list[Taken], Tensor]:
    """What each tree's request takes, and the logits [batch * W, vocab] it was taken from, penalised and tempered.

    logits are the target's, W rows a tree. rejection: the method for requests that sample. Raises NumericError.
    """
    width = logits.shape[0] // len(trees)
    asked = planted.parameters(fault, [tree.sampling for tree in trees])
    own = list(torch.split(planted.logits(fault, logits, len(trees)), width))
    for i, (tree, s) in enumerate(zip(trees, asked, strict=True)):
        if s.penalises:
            frozen = fault is Fault.PENALTIES_FROZEN
            own[i] = draws.penalised(own[i], [tree.output] * width if frozen else tree.histories(), s)
        own[i] = draws.tempered(own[i], s)
    # Untouched logits stay one tensor: nothing is copied, and a greedy batch is computed as it always was.
    changed = any(s.penalises or not s.greedy for s in asked)
    used = torch.cat([scores.float() for scores in own]) if changed else planted.logits(fault, logits, len(trees))
    greedy = choices(used)
    taken = []
    for i, (tree, s) in enumerate(zip(trees, asked, strict=True)):
        choice = greedy[i * width : (i + 1) * width]
        if not s.greedy:
            weights = _weights(own[i], s, fault)
            if rejection:
                taken.append(_reject(tree, weights, s.seed))
                continue
            choice = draws.draw(weights, s.seed, [tree.length + depth for depth in tree.depth])
        if fault is not None:
            taken.append(Taken(*planted.walk(fault, tree, choice, own[i])))
            continue
        path = accepted_path(tree.parent, tree.token, choice)
        taken.append(Taken(path, [choice[node] for node in path]))
    return taken, used


def _weights(scores: Tensor, s: Sampling, fault: Fault | None) -> Tensor:
    if fault is Fault.FILTER_ORDER and s.top_k > 0:
        return planted.top_k_before_top_p(draws.filtered(scores, replace(s, top_p=1.0)), s)
    return draws.filtered(scores, s)


def _reject(tree: Verified, weights: Tensor, seed: int) -> Taken:
    path, left = rejection_path(
        tree.parent,
        tree.token,
        weights.tolist(),
        lambda node, count: draws.coins(seed, tree.length + tree.depth[node], count),
    )
    last = draws.draw(torch.tensor([left], dtype=torch.float64), seed, [tree.length + tree.depth[path[-1]]])
    return Taken(path, [*(tree.token[node] for node in path[1:]), *last])
