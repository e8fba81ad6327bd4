"""overlay ddtree_sampler, ddtree_sampling, ddtree_checks on tensor-parallel ranks: real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.longer import longer

from . import inside_ddtree_ranks
from .inside_ddtree_ranks import BATCH, BLOCK
from .marks import NEWEST, every_base
from .trees import BASE, Tree

pytestmark = pytest.mark.slow

CASES: list[dict[str, Any]] = [
    # as many rows on every rank
    {"vocab": 60, "padding": 6, "seed": 1},
    # odd: the last rank has a row or two of padding
    {"vocab": 23, "padding": 6, "seed": 2},
    {"vocab": 61, "padding": 6, "seed": 3, "half": True},
    # padded as SGLang does: the first rank has everything, the others have padding alone
    {"vocab": 23, "padding": 192, "seed": 4},
    # the last rank has fewer rows than candidates
    {"vocab": 14, "padding": 12, "seed": 5},
    {"vocab": 61, "padding": 6, "seed": 6, "topk": 1},
]
EXACT, TIED = 1e-5, {"vocab": 47, "padding": 6, "ties": True}

FAULTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "local ids": {"ddtree_sampler": [("ids = ids + self._start", "ids = ids")]},
    "padding drafted": {"ddtree_sampler": [("self._weight = weight[:num_org]", "self._weight = weight")]},
    "no gather": {"ddtree_sampler": [("if self._tp_group is None:", "if True:")]},
    "the first shard's sum": {"ddtree_candidates": [("torch.logsumexp(totals, dim=0)", "totals[0]")]},
    "ranks of rank order": {
        "ddtree_candidates": [("chosen = ids.permute(1, 0, 2)", "chosen = ids.flip(0).permute(1, 0, 2)")]
    },
}
TIES_FAULT = {
    "ddtree_candidates": [
        ("flat = values.permute", "flat = values.flip(0).permute"),
        ("chosen = ids.permute", "chosen = ids.flip(0).permute"),
    ]
}


def wrong(told: dict[str, Any], case: dict[str, Any]) -> str | None:
    """The first thing that is not as on one rank, or not the vocabulary's own."""
    first, *others = told["ranks"]
    if any("raised" in rank for rank in told["ranks"]):
        return str(told["ranks"])
    if any(rank["trees"] != first["trees"] for rank in others):
        return "the ranks' trees differ"
    tied = bool(case.get("ties"))
    for one in range(BATCH):
        for place in range(BLOCK - 1):
            ids, logprobs = first["ids"][one][place], first["logprobs"][one][place]
            full = told["logprobs"][one][place]
            if not all(0 <= token < case["vocab"] for token in ids) or len(set(ids)) != len(ids):
                return f"candidates {ids}"
            best = sorted(range(len(full)), key=lambda token: (-full[token], token))[: len(ids)]
            if not tied and ids != best:
                return f"candidates {ids}, not {best}"
            near = 0.05 if case.get("half") else EXACT
            if any(abs(mine - full[token]) > near for mine, token in zip(logprobs, ids, strict=True)):
                return f"log-probabilities {logprobs} of {ids}"
            order = [(-mine, token) for mine, token in zip(logprobs, ids, strict=True)]
            if order != sorted(order):
                return f"order {order}"
            if abs(sum(logprobs) - sum(full[token] for token in best)) > len(ids) * near:
                return f"not the best: {ids}"
    return None if tied or first["trees"] == told["one"]["trees"] else "not one rank's tree"


@pytest.mark.parametrize("ranks", [2, longer(3)])
def test_every_rank_drafts_what_one_rank_would(ranks: int, interpreted: Tree) -> None:
    told = interpreted(inside_ddtree_ranks.drawn, CASES, ranks, {})
    assert [wrong(one, case) for one, case in zip(told, CASES, strict=True)] == [None] * len(CASES)
    rows = [[mine["rows"] for mine in one["ranks"]] for one in told]
    assert any(real == 0 for case in rows for real, _ in case), "no rank has padding alone"
    assert any(0 < real < padded for case in rows for real, padded in case), "no rank has rows and padding"


@pytest.mark.parametrize("ranks", [2, longer(3)])
def test_equal_logits_are_broken_by_the_lower_id_on_every_rank(ranks: int, interpreted: Tree) -> None:
    cases = [{**TIED, "seed": seed} for seed in range(5)]
    told = interpreted(inside_ddtree_ranks.drawn, cases, ranks, {})
    assert [wrong(one, case) for one, case in zip(told, cases, strict=True)] == [None] * len(cases)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_ranks_is_seen(fault: str, interpreted: Tree) -> None:
    case = CASES[1]
    (told,) = interpreted(inside_ddtree_ranks.drawn, [case], 2, FAULTS[fault])
    assert wrong(told, case) is not None


def test_ties_broken_by_the_higher_rank_are_seen(interpreted: Tree) -> None:
    cases = [{**TIED, "seed": seed} for seed in range(5)]
    told = interpreted(inside_ddtree_ranks.drawn, cases, 2, TIES_FAULT)
    assert any(wrong(one, case) for one, case in zip(told, cases, strict=True))


@every_base
def test_unseeded_draws_are_the_first_ranks_on_all(patched: Tree) -> None:
    first, *others = patched(inside_ddtree_ranks.shared_draws, 3, [])
    assert len(first) == 21 and all(rank == first for rank in others)
    alone = [("if get_parallel().tp_size > 1:", "if False:")]
    first, *others = patched(inside_ddtree_ranks.shared_draws, 3, alone)
    assert all(rank != first for rank in others), "the ranks' generators do not differ, so nothing was shown"


def test_ranks_with_other_trees_stop_the_server(interpreted: Tree) -> None:
    assert interpreted(inside_ddtree_ranks.disagreeing, 2, False) == [None, None]
    assert all("built different trees" in said for said in interpreted(inside_ddtree_ranks.disagreeing, 2, True))


SETTING = {"block": 4, "budget": 6, "topk": 3, "graphs": 3}
GREEDY = [{"temperature": 0.0}, {"temperature": 0.0}]
SEEDED = [{"temperature": 1.0, "sampling_seed": 7, "top_k": 5, "top_p": 0.7}, {"temperature": 0.7, "sampling_seed": 8}]


@pytest.mark.parametrize(
    ("base", "ranks", "sampling"),
    [(BASE, 2, SEEDED), (BASE, 3, GREEDY), (NEWEST, 2, SEEDED)],
    ids=["2-seeded", "3-greedy", f"2-seeded-{NEWEST}"],
    indirect=["base"],
)
def test_whole_steps_on_ranks_commit_what_one_rank_does(
    ranks: int, sampling: list[dict[str, Any]], interpreted: Tree
) -> None:
    """The text is the target's on every rank, in as many tokens a step: ranks that accept alike drafted alike."""
    told = interpreted(inside_ddtree_ranks.decoded, ranks, SETTING, [5, 11], 6, sampling, {})
    (alone,) = interpreted(inside_ddtree_ranks.decoded, 1, SETTING, [5, 11], 6, sampling, {})
    assert alone["wrong"] is None and max(alone["commits"]) > 1
    assert told == [alone] * ranks


def test_whole_steps_with_another_tree_on_each_rank_are_stopped(interpreted: Tree) -> None:
    """The texts would be right all the same for a while: only the ranks' comparison sees it."""
    told = interpreted(inside_ddtree_ranks.decoded, 2, SETTING, [5, 11], 6, GREEDY, FAULTS["no gather"])
    assert all("built different trees" in rank["raised"] for rank in told)
