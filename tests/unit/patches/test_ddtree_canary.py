"""overlay ddtree_canary, ddtree_worker: a server whose graph does not read the tree mask does not start."""

from __future__ import annotations

import pytest

from tests.longer import longer

from . import inside_ddtree_canary, inside_ddtree_steps
from .marks import NEWEST
from .test_ddtree_steps import FAULTS, setting
from .trees import BASE, Tree

WIDTHS = [(2, 1), (3, 2), (8, 7), (9, 3), (17, 7), (65, 7)]
"""(W, levels)"""


@pytest.mark.parametrize(("width", "levels"), WIDTHS)
def test_the_trees_are_what_the_mask_can_hold(width: int, levels: int, patched: Tree) -> None:
    tree = patched(inside_ddtree_canary.tree_of, width, levels)
    assert len(tree["parents"]) == width and max(tree["depths"]) <= levels
    for node in range(1, width):
        parent = tree["parents"][node]
        assert parent < node and tree["depths"][node] == tree["depths"][parent] + 1
    assert all(tree["tokens"][one] == tree["tokens"][other] for one, other in tree["twins"])
    assert bool(tree["twins"]) == (width >= 3)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize(("width", "levels"), WIDTHS)
def test_it_passes_what_is_right(width: int, levels: int, requests: int, bfloat16: bool, patched: Tree) -> None:
    assert patched(inside_ddtree_canary.said, width, levels, requests, "none", bfloat16) == []
    assert patched(inside_ddtree_canary.said, width, levels, requests, "noise", bfloat16) == []
    assert patched(inside_ddtree_canary.said, width, levels, requests, "a token ruled out", bfloat16) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("causal", "which is not below it"),
        ("all blocked", "does not move nodes"),
        ("by index", "equal tokens at equal depth"),
        ("second request", "request 1"),
        ("not a number", "not numbers"),
    ],
)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_it_names_what_is_wrong(fault: str, words: str, bfloat16: bool, patched: Tree) -> None:
    said = patched(inside_ddtree_canary.said, 9, 4, 2, fault, bfloat16)
    assert any(words in one for one in said)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "graphs"), [(BASE, 0), (BASE, 3), (NEWEST, 3)], indirect=["base"])
def test_the_worker_runs_it_through_its_own_verify_and_leaves_nothing(graphs: int, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_steps.started, setting(4, 6, 3, graphs))
    assert told == {"said": None, "table": True, "event": None}


@pytest.mark.parametrize(
    ("base", "fault"),
    [
        (BASE, "mask-rows-by-block-size"),
        longer(BASE, "mask-offset-of-second-request"),
        longer(BASE, "mask-all-blocked"),
        (BASE, "rope-by-index"),
        (NEWEST, "mask-rows-by-block-size"),
    ],
    indirect=["base"],
)
def test_a_worker_with_a_planted_fault_does_not_start(fault: str, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_steps.started, setting(4, 6, 3, 3), str(FAULTS / f"{fault}.patch"))
    assert told["said"].startswith("DDTREE start-up canary: request")
    assert told["table"]
