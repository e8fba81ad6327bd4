"""Inside a tree's Python: the words of --speculative-ddtree-ladder, and which graphs they need."""

from __future__ import annotations


def rungs(text: str | None, budget: int) -> list[list[int]] | str:
    """[first, budget] each, or what is said against the words."""
    from sglang.srt.speculative.ddtree_ladder import parse_ladder

    try:
        return [[rung.first, rung.budget] for rung in parse_ladder(text, budget)]
    except ValueError as error:
        return str(error)


def sizes(text: str, captured: list[int]) -> list[list[int]]:
    """The batch sizes that each rung's graphs are captured for."""
    from sglang.srt.speculative.ddtree_ladder import graph_sizes, parse_ladder

    made = parse_ladder(text, 16)
    return [graph_sizes(made, place, captured) for place in range(len(made))]
