"""The walk: which drafted path the target itself would have written.

Two methods for a request that samples. Both leave the target's own law of the output unchanged.

*Per node* (`accepted_path`): one token is drawn from the target's distribution after each node, with the noise of the
node's position, and the walk goes on while the drawn token was drafted. Why the law is the target's: of the nodes at
one position at most one is visited, so a position's noise is used at most once; which node that is depends on the
noise of earlier positions only. Given the text so far each output token is therefore a fresh draw from the target's
distribution after that text, whatever was drafted. That siblings share their noise is harmless, and it is what makes
AR, chain and tree draw the very same tokens from one seed.

*Rejection* (`rejection_path`): the drafter's candidates at a node are certain, not drawn, so a child c is accepted with
the target's q(c); after a rejection c is struck from q, the next child is tried on what is left, and where none is
accepted the token is drawn from the rest (Miao et al., SpecInfer, arXiv 2305.09781, with point masses for the drafts;
SGLang's tree_speculative_sampling_target_only with draft_probs 0 is the same). By induction over the children every
token t comes out with q(t): what has been struck before leaves q(rest), of which t then gets q(t) / q(rest).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accepted_path(parent: Sequence[int], token: Sequence[int], choice: Sequence[int]) -> list[int]:
    """Nodes from the root along which every token is the target's own choice; the root is always first.

    choice[i] is the target's argmax after node i. The bonus token is choice[path[-1]].
    """
    child = {(parent[node], token[node]): node for node in range(len(parent) - 1, 0, -1)}
    path = [0]
    while (following := child.get((path[-1], choice[path[-1]]))) is not None:
        path.append(following)
    return path


def rejection_path(
    parent: Sequence[int],
    token: Sequence[int],
    probabilities: Sequence[list[float]],
    coins: Callable[[int, int], Sequence[float]],
) -> tuple[list[int], list[float]]:
    """(nodes from the root that were accepted, what is left of q after the last of them: weights to draw from).

    probabilities[i] are the target's weights after node i, [vocab]; coins(node, count) are uniform in (0, 1).
    """
    children: dict[int, list[int]] = {}
    for node in range(1, len(parent)):
        children.setdefault(parent[node], []).append(node)
    path, left = [0], list(probabilities[0])
    while tried := children.get(path[-1], []):
        accepted = None
        for child, coin in zip(tried, coins(path[-1], len(tried)), strict=True):
            if coin * sum(left) < left[token[child]]:
                accepted = child
                break
            left[token[child]] = 0.0
        if accepted is None:
            break
        path.append(accepted)
        left = list(probabilities[accepted])
    return path, left
