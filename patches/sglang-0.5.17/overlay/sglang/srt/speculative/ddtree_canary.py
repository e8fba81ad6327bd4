"""DDTREE: the start-up canary. Does the captured kernel read the mask that is written, for every request of a batch?

A graph that was captured without a mask, a mask in another layout, or one that blocks everything gives fluent text that
is slightly wrong. So before the first request a small tree of two equal branches is verified through the very graph
that will serve, and then again with one token changed:

* a token changed on one branch leaves every other node, and the other request, as it was;
* it moves all nodes below it, and a changed root moves its whole tree: a mask that blocks everything does not pass;
* equal tokens at equal depth under one root give equal logits: positions go by depth, not by index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF_TOLERANCE, FULL_TOLERANCE = 2.0**-6, 1e-4
"""Of the largest logit: what rounding may move a node that must stay, for 16-bit types and for float32."""
NOISE = 4.0
"""How far beyond the difference of two equal runs a change must be to count as one."""


@dataclass(frozen=True)
class CanaryTree:
    """Chains under one root, the first two of `branch` nodes each and with equal tokens; the rest fill up W nodes."""

    parents: list[int]
    depths: list[int]
    tokens: list[int]
    branch: int

    @property
    def first(self) -> list[int]:
        """The nodes of the first branch from its top down."""
        return list(range(1, self.branch + 1))

    @property
    def twins(self) -> list[tuple[int, int]]:
        """Pairs of nodes of the two branches at equal depth; none where W is too small for two branches."""
        second = self.branch + 1
        if len(self.parents) < second + self.branch:
            return []
        return [(node, node + self.branch) for node in self.first]


def canary_tree(width: int, levels: int, vocab_size: int) -> CanaryTree:
    """width: W, at least 2. levels: no node is deeper."""
    branch = max(1, min(levels, (width - 1) // 2))
    parents, depths, tokens = [0], [0], [11 % vocab_size]
    for node in range(1, width):
        top = (node - 1) % branch == 0
        parents.append(0 if top else node - 1)
        depths.append(1 if top else depths[-1] + 1)
        twin = branch < node <= 2 * branch
        tokens.append(tokens[node - branch] if twin else (101 + 37 * node) % vocab_size)
    return CanaryTree(parents, depths, tokens, branch)


def run_canary(
    tree: CanaryTree, requests: int, vocab_size: int, half: bool, forward: Callable[[Tensor], Tensor]
) -> list[str]:
    """What is wrong; empty when all is well.

    forward: tokens int64 [requests, W], on the CPU, of trees of this shape -> logits [requests, W, vocabulary]. half:
    the target computes in a 16-bit type.
    """
    tokens = torch.tensor([tree.tokens] * requests)
    base, again = forward(tokens).float(), forward(tokens).float()
    if bool(torch.isnan(base).any()):
        return ["logits of the canary are not numbers"]
    # a target may rule tokens out
    base, again = _finite(base), _finite(again)
    noise = NOISE * float((again - base).abs().max())
    stays = max(noise, float(base.abs().max()) * (HALF_TOLERANCE if half else FULL_TOLERANCE))
    faults = []
    for request in range(requests):
        for one, other in tree.twins:
            apart = float((base[request, one] - base[request, other]).abs().max())
            if not apart <= stays:
                faults.append(
                    f"request {request}: nodes {one} and {other} have equal tokens at equal depth, their logits are "
                    f"{apart:.3g} apart"
                )
        everything = list(range(1, len(tree.parents)))
        for changed, below in ((1, tree.first[1:]), (0, everything)):
            other_token = tokens.clone()
            other_token[request, changed] = (tree.tokens[changed] + vocab_size // 2 + 1) % vocab_size
            moved = (_finite(forward(other_token).float()) - base).abs().amax(dim=-1)
            faults += _judge(moved, request, changed, below, noise, stays)
    return faults


@contextlib.contextmanager
def unwatched(watch: Any) -> Iterator[None]:
    """Of SGLang's own watch over KV slots (``--kv-canary``), what it finds meanwhile is neither raised nor kept.

    It follows requests from their prefill on, and the start-up canary's have none. watch: a CanaryManager, or None.
    """
    if watch is None:
        yield
        return
    # Its steps also copy to the host what the kernels found; the one after the next would raise for it.
    reports, watch._violation_manager = watch._violation_manager, _Silent()
    try:
        yield
    finally:
        watch._violation_manager = reports
        found = watch._device_state.violation_log
        found.violation_ring.zero_()
        found.violation_write_index.zero_()


class _Silent:
    def step(self) -> None:
        """Nothing is reported."""


def _finite(logits: Tensor) -> Tensor:
    return torch.nan_to_num(logits, nan=float("nan"), posinf=0.0, neginf=0.0)


def _judge(moved: Tensor, request: int, changed: int, below: list[int], noise: float, stays: float) -> list[str]:
    """moved: [requests, W], the largest change of each node's logits after `changed` got another token; what is not a
    number has moved where it must not, and not where it must."""
    what = f"request {request}: another token at node {changed}"
    still = [node for node in below if not float(moved[request, node]) > noise]
    faults = [f"{what} does not move nodes {still} below it"] if still else []
    rest = moved.clone()
    rest[request, [changed, *below]] = 0.0
    if not float(rest.max()) <= stays:
        there, node = divmod(int(rest.argmax()), rest.shape[1])
        faults.append(f"{what} moves node {node} of request {there} by {float(rest.max()):.3g}, which is not below it")
    return faults
