"""01-dflash-output-logprobs, 03-input-logprob-last-id, 08-mixed-token-ids-logprobs: what a verify tells of its tokens,
the echo of a prompt, and requests side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import inside_logprobs
from .inside_logprobs import BLOCK, VOCABULARY
from .marks import every_base
from .trees import RaisedThereError, Tree

SEED = 5
NEAR = 1e-6


def target(count: int) -> torch.Tensor:
    """The target's logits: [request, position, VOCABULARY]."""
    return inside_logprobs.logits(SEED, count).view(count, BLOCK, VOCABULARY)


def drafts_right_for(*correct: int) -> list[list[int]]:
    """For each request a draft of which exactly so many tokens are the target's."""
    drafts = target(len(correct)).argmax(-1)[:, : BLOCK - 1].clone()
    for request, count in enumerate(correct):
        if count < BLOCK - 1:
            drafts[request, count] = (drafts[request, count] + 1) % VOCABULARY
    return [[int(token) for token in row] for row in drafts]


def verify(tree: Tree, correct: tuple[int, ...], temperatures: list[float], **asked: Any) -> list[dict[str, Any]]:
    tops = asked.get("tops", [0] * len(correct))
    ids = asked.get("ids", [None] * len(correct))
    # min_p 1 leaves the argmax alone at any temperature
    given = [{"temperature": temperature, "min_p": 1.0 if temperature else 0.0} for temperature in temperatures]
    told: list[dict[str, Any]] = tree(inside_logprobs.verified, SEED, drafts_right_for(*correct), given, tops, ids)
    return told


@every_base
def test_every_emitted_token_has_the_logprob_of_the_row_that_chose_it(patched: Tree) -> None:
    correct = (0, 2, BLOCK - 1)
    wanted = target(3).log_softmax(-1)
    for request, told in enumerate(verify(patched, correct, [0.0] * 3)):
        emitted = correct[request] + 1
        best = wanted[request, :emitted].max(-1)
        assert told["tokens"] == told["logprob_tokens"] == best.indices.tolist()
        assert told["logprobs"] == pytest.approx(best.values.tolist(), abs=NEAR)


@every_base
def test_ranks_and_chosen_ids_where_they_are_asked_for(patched: Tree) -> None:
    first, second = verify(patched, (1, 2), [0.0, 0.0], tops=[3, 0], ids=[None, [4, 0]])
    rows = target(2).log_softmax(-1)
    best = rows[0, :2].topk(3)
    assert first["top_tokens"] == best.indices.tolist()
    assert [entry for row in first["top"] for entry in row] == pytest.approx(best.values.flatten().tolist(), abs=NEAR)
    assert second["top"] == []
    chosen = [entry for row in second["chosen"] for entry in row]
    assert chosen == pytest.approx(rows[1, :3, [4, 0]].flatten().tolist(), abs=NEAR)


@every_base
def test_temperature_counts_per_request(patched: Tree) -> None:
    temperatures = [0.5, 2.0]
    for request, told in enumerate(verify(patched, (2, 1), temperatures)):
        rows = (target(2)[request] / temperatures[request]).log_softmax(-1)
        wanted = [rows[position, token].item() for position, token in enumerate(told["tokens"])]
        assert told["logprobs"] == pytest.approx(wanted, abs=NEAR)


def test_stock_refuses(stock: Tree) -> None:
    with pytest.raises(RaisedThereError, match="DFLASH speculative decoding does not support return_logprob yet"):
        verify(stock, (1,), [0.0])


@every_base
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_batch_may_mix_requests_with_and_without_chosen_ids(stage: str, patched: Tree) -> None:
    wanted = inside_logprobs.logits(3, 1)[0].log_softmax(-1)[[2, 0]].tolist()
    asked, other = patched(inside_logprobs.mixed, stage)
    assert asked == pytest.approx(wanted, abs=NEAR)
    assert other == []


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_in_stock_it_ends_the_scheduler(stage: str, stock: Tree) -> None:
    with pytest.raises(RaisedThereError, match="'list' object has no attribute 'tolist'"):
        stock(inside_logprobs.mixed, stage)


@every_base
def test_the_last_id_of_the_vocabulary_is_echoed(patched: Tree, stock: Tree) -> None:
    ids = [3, VOCABULARY - 1, VOCABULARY, 0]
    # beyond the vocabulary is the hash of an image
    assert patched(inside_logprobs.echoed, ids, 0) == [3, VOCABULARY - 1, 0, 0]
    assert patched(inside_logprobs.echoed, ids, 1) == [VOCABULARY - 1, 0, 0]
    assert stock(inside_logprobs.echoed, ids, 0) == [3, 0, 0, 0]
