"""What the server says it executed: faults of the tree that change no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddtree_ops.engine.tree import tree_width
from ddtree_ops.exactness import GatePlan, Kind, Verdict, run_gate, structure
from ddtree_ops.exactness.plan import Tree
from ddtree_ops.exactness.structure import Executed
from tests.unit.exactness.toy import Toy

Make = Callable[..., GatePlan]
TREE = Tree(block_size=8, budget=8, topk=4)


def codes(verdict: Verdict, effect: str) -> set[str]:
    return {reason.code for reason in verdict.reasons if reason.effect == effect}


def tells(toy: Toy, nodes: int, children: int, depth: int) -> None:
    figures = {"nodes": nodes, "max_children": children, "max_depth": depth}
    toy.info["internal_states"] = [{"executed": figures}]


@pytest.mark.parametrize("topk", [1, 2, 4, 8])
@pytest.mark.parametrize("budget", [1, 7, 8, 63, 64, 65, 1024])
def test_the_nodes_of_a_tree_are_the_engines_width_less_the_root(budget: int, topk: int) -> None:
    assert structure.nodes_of(Tree(block_size=8, budget=budget, topk=topk), 1) == [tree_width(7, topk, budget) - 1]
    assert structure.nodes_of(Tree(block_size=8), 1) == [7]


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ((8, 4, 6), set()),
        ((8, 3, 6), set()),
        ((7, 4, 6), {"executed-nodes"}),
        ((8, 5, 3), {"executed-topk"}),
        ((8, 1, 8), {"executed-depth"}),
    ],
)
def test_trees_that_the_profile_does_not_want_fail(
    toy: Toy, plan: Make, figures: tuple[int, int, int], found: set[str]
) -> None:
    tells(toy, *figures)
    verdict = run_gate(plan(tree=TREE, second_turn_tokens=0))
    assert codes(verdict, "fail") == found and verdict.kind is (Kind.FAIL if found else Kind.EXACT)
    assert ("narrow-trees" in codes(verdict, "note")) == (figures[1] < 4)
    assert verdict.executed is not None and verdict.executed.samples == 30
    assert any(f"{figures[0]} nodes, at most {figures[1]} children" in line for line in verdict.lines())


def test_a_chain_and_no_speculation_have_their_own_figures() -> None:
    assert structure.wrong(Tree(block_size=8), [Executed(7, 1, 7)]) == []
    assert {code for code, _ in structure.wrong(Tree(block_size=8), [Executed(7, 2, 6)])} == {"executed-topk"}
    assert structure.wrong(None, [Executed(0, 0, 0)]) == []
    assert "executed-nodes" in {code for code, _ in structure.wrong(None, [Executed(1, 1, 1)])}


def test_one_wrong_step_among_many_is_enough() -> None:
    assert [code for code, _ in structure.wrong(TREE, [Executed(8, 4, 5), Executed(7, 4, 5)])] == ["executed-nodes"]


def test_a_ladders_smaller_trees_are_right_where_so_many_requests_can_run() -> None:
    """A budget clamped to a rung of the ladder shows with one request, which the rung is not for."""
    tree = Tree(block_size=8, budget=16, topk=4, ladder="4:8,8:0")
    assert tree.shape == "tree 16/4 ladder 4:8,8:0 block 8"
    assert structure.wrong(tree, [Executed(16, 4, 7, 1), Executed(8, 4, 7, 4), Executed(16, 4, 7, 4)]) == []
    assert structure.wrong(tree, [Executed(0, 0, 0, 8), Executed(8, 4, 7, 8)]) == []
    for clamped in (Executed(8, 4, 7, 3), Executed(0, 0, 0, 7), Executed(4, 4, 4, 8)):
        ((code, message),) = structure.wrong(tree, [clamped])
        assert code == "executed-nodes" and str(clamped.nodes) in message


@pytest.mark.parametrize("states", [None, [], [3], [{}], "x"])
def test_a_server_that_does_not_tell_is_noted_and_passes_no_check(toy: Toy, plan: Make, states: Any) -> None:
    toy.info["internal_states"] = states
    verdict = run_gate(plan(tree=TREE, second_turn_tokens=0))
    assert verdict.kind is Kind.EXACT and verdict.executed is None
    assert "structure-untold" in codes(verdict, "note")


@pytest.mark.parametrize("given", [None, {}, {"nodes": 8}, {"nodes": True, "max_children": 1, "max_depth": 1}, [8]])
def test_figures_of_another_form_are_not_read(given: Any) -> None:
    assert structure.executed({"internal_states": [{"executed": given}]}) is None


def test_more_tokens_than_the_steps_can_have_committed_fail(toy: Toy, plan: Make) -> None:
    toy.accept = 30
    verdict = run_gate(plan(tree=TREE, second_turn_tokens=0))
    assert verdict.kind is Kind.FAIL and codes(verdict, "fail") == {"commit-length"}
