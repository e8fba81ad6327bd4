"""What the server says it verified, against what the profile wants: faults of the tree that change no token.

``/server_info`` of the reference engine and of the patched SGLang tells the last step's trees in
``internal_states[0].executed``: nodes besides the root, most children of a node, deepest path. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ddtree_ops.engine.ladder import parse_ladder
from ddtree_ops.exactness.plan import Tree


@dataclass(frozen=True, slots=True)
class Executed:
    """The largest figures over the trees of one step, of ``requests`` at most."""

    nodes: int
    max_children: int
    max_depth: int
    requests: int = 1


def told(info: dict[str, object]) -> bool:
    """Whether this server tells what it executes, be it that no step ran yet."""
    return "executed" in _state(info)


def executed(info: dict[str, object], requests: int = 1) -> Executed | None:
    """The last step's figures; None before the first step, or where they are not told as three counts."""
    given = _state(info).get("executed")
    if not isinstance(given, dict):
        return None
    counts = [given.get(name) for name in ("nodes", "max_children", "max_depth")]
    known = [count for count in counts if isinstance(count, int) and not isinstance(count, bool) and count >= 0]
    if len(known) != 3:
        return None
    nodes, children, depth = known
    return Executed(nodes, children, depth, requests)


def _state(info: dict[str, object]) -> dict[str, object]:
    states = info.get("internal_states")
    return states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}


def nodes_of(tree: Tree, requests: int) -> list[int]:
    """Nodes besides the root that a step of ``requests`` or fewer verifies: the budget, fewer only where there are not
    so many paths, and those of the ladder's rungs that begin below."""
    depth, topk = tree.block_size - 1, tree.topk or 1
    if tree.budget is None:
        return [depth]
    rungs = parse_ladder(tree.ladder, tree.budget)
    return [_paths(depth, topk, budget) for first, budget in rungs if first <= requests]


def _paths(depth: int, topk: int, budget: int) -> int:
    """How many there are, at most ``budget``."""
    paths = 0
    for level in range(1, depth + 1):
        paths += topk**level
        if paths >= budget:
            return budget
    return paths


def wrong(tree: Tree | None, seen: Collection[Executed]) -> list[tuple[str, str]]:
    """(code, message) for everything that no correct engine executes; ``tree`` None: without speculation."""
    depth = 0 if tree is None else tree.block_size - 1
    children = 0 if tree is None else 1 if tree.budget is None else tree.topk or 1
    found: dict[str, str] = {}
    for one in sorted(seen, key=lambda one: (one.nodes, one.max_children, one.max_depth)):
        allowed = [0] if tree is None else nodes_of(tree, one.requests)
        if one.nodes not in allowed:
            wanted = " or ".join(map(str, allowed))
            found["executed-nodes"] = f"the server verifies {one.nodes} nodes a step, the profile says {wanted}"
        if one.max_children > children:
            found["executed-topk"] = f"a node has {one.max_children} children, the profile keeps {children} candidates"
        if one.max_depth > depth:
            found["executed-depth"] = f"a path is {one.max_depth} deep, the profile's block allows {depth}"
    return list(found.items())


def narrower(tree: Tree | None, seen: Collection[Executed]) -> str | None:
    """Why the trees may be narrower than asked: no node ever had topk children. A sure drafter does that too."""
    if tree is None or tree.budget is None or not seen:
        return None
    most, could = max(one.max_children for one in seen), min(tree.topk or 1, tree.budget)
    if most >= could:
        return None
    return f"no node had more than {most} children where topk allows {could}; compare verify counts with a golden's"
