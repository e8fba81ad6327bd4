"""The walk: which drafted path the target itself would have written."""

from __future__ import annotations

from collections.abc import Sequence


def accepted_path(parent: Sequence[int], token: Sequence[int], choice: Sequence[int]) -> list[int]:
    """Nodes from the root along which every token is the target's own choice; the root is always first.

    choice[i] is the target's argmax after node i. The bonus token is choice[path[-1]].
    """
    child = {(parent[node], token[node]): node for node in range(len(parent) - 1, 0, -1)}
    path = [0]
    while (following := child.get((path[-1], choice[path[-1]]))) is not None:
        path.append(following)
    return path
