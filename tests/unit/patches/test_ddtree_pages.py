"""10-, 13-ddtree: pages of several tokens, from a request's prefill to its end, over SGLang's own memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.longer import longer

from . import inside_ddtree_pages
from .test_ddtree_steps import CAPTURED, EAGER, FAULTS, setting
from .trees import Tree

pytestmark = pytest.mark.slow

CONTEXT = 128
TURNS: list[dict[str, int]] = [
    {"prompt": 50, "tokens": 16},
    {"prompt": 5, "tokens": 14},
    {"prompt": 4, "tokens": 8, "after": 0},
    {"prompt": 3, "tokens": 8, "after": 1},
    {"prompt": 7, "tokens": 30, "after": 2, "aborted": 5},
]
"""Two chats at once, of up to three turns; the last is aborted."""
SHORT: list[dict[str, int]] = [
    {"prompt": 18, "tokens": 8},
    {"prompt": 9, "tokens": 10},
    {"prompt": 3, "tokens": 8, "after": 0},
]
GROWING: list[dict[str, int]] = [{"prompt": length, "tokens": 40} for length in (9, 5, 11)]
TO_THE_END: list[dict[str, int]] = [
    *({"prompt": length, "tokens": 200} for length in (107, 112, 117)),
    {"prompt": 20, "tokens": 9},
]
LAG, AT_ONCE = True, False


def served(tree: Tree, page: int, asked: list[dict[str, int]], slots: int, lag: bool, **more: Any) -> dict[str, Any]:
    given = {**setting(4, 6, 3, more.pop("graphs", CAPTURED)), "page": page, **more}
    told: dict[str, Any] = tree(inside_ddtree_pages.served, given, asked, CONTEXT, slots, lag)
    return told


@pytest.mark.parametrize(("page", "lag"), [longer(1, LAG), longer(4, AT_ONCE), (16, LAG), (64, AT_ONCE)])
def test_chats_go_on_from_the_cache_and_give_everything_back(page: int, lag: bool, interpreted: Tree) -> None:
    told = served(interpreted, page, TURNS, 512, lag)
    assert told["wrong"] is None
    assert max(told["commits"]) > 1 and told["retracted"] == 0
    # the first turn fills a page of 64
    assert told["cached"] >= 64 and (page == 1 or told["cached"] % page == 0)


@pytest.mark.parametrize(("page", "slots", "lag"), [longer(4, 120, LAG), (16, 144, AT_ONCE)])
def test_a_request_that_is_retracted_leaves_no_page_behind(page: int, slots: int, lag: bool, interpreted: Tree) -> None:
    told = served(interpreted, page, GROWING, slots, lag)
    assert told["wrong"] is None and told["retracted"] > 0


@pytest.mark.parametrize("page", [16, longer(64)])
def test_three_that_reach_the_contexts_end_stay_in_their_rows(page: int, interpreted: Tree) -> None:
    told = served(interpreted, page, TO_THE_END, 512, LAG)
    assert told["wrong"] is None
    assert told["lengths"][:3] == [CONTEXT] * 3


@pytest.mark.parametrize(("budget", "topk", "graphs"), [(2, 2, CAPTURED), longer(12, 4, EAGER)])
def test_trees_narrower_than_the_block_and_wider_than_a_page(
    budget: int, topk: int, graphs: int, interpreted: Tree
) -> None:
    told = served(interpreted, 4, SHORT, 512, LAG, budget=budget, topk=topk, graphs=graphs)
    assert told["wrong"] is None and max(told["commits"]) > 1


def test_latents_in_pages(interpreted: Tree) -> None:
    told = served(interpreted, 16, SHORT, 512, LAG, latent=True)
    assert told["wrong"] is None and told["cached"] > 0


@pytest.mark.parametrize("fault", ["mask-rows-by-block-size", longer("stale-kv")])
def test_with_pages_too_a_planted_fault_is_seen(fault: str, interpreted: Tree) -> None:
    given = {**setting(4, 6, 3, CAPTURED), "page": 16}
    told = interpreted(inside_ddtree_pages.served, given, TURNS, CONTEXT, 512, AT_ONCE, str(FAULTS / f"{fault}.patch"))
    assert told["wrong"] is not None
