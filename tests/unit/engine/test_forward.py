"""Both models against the plain float64 implementation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ddtree_ops.engine import logprobs
from ddtree_ops.engine.step import Prompt, Sequence

from .conftest import Bench, prompts
from .pairs import Plain, write_pair


def near(found: Tensor, expected: Tensor) -> None:
    assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_prefill_of_several_prompts_equals_the_plain_target(tmp_path: Path, tied: bool) -> None:
    pair = write_pair(tmp_path / "pair", seed=11, tied=tied)
    bench, plain = Bench.of(pair, "AR"), Plain(pair)
    batch = prompts(5, low=1, high=20)
    rows = [bench.decoder.table.allocate(len(prompt)) for prompt in batch]
    asked = [Prompt(Sequence(row), p, 0, False) for row, p in zip(rows, batch, strict=True) if row is not None]
    for prompt, logits in zip(batch, bench.decoder.prefill(asked), strict=True):
        near(logits, plain.target(prompt))


def test_the_tied_and_the_untied_pair_are_not_the_same(tmp_path: Path) -> None:
    tied, untied = (Plain(write_pair(tmp_path / str(t), seed=11, tied=t)) for t in (True, False))
    assert (tied.target([3, 4]) - untied.target([3, 4])).abs().max() > 0.1


def test_a_draft_after_a_prefill_equals_the_plain_drafter(pair: Path, plain: Plain) -> None:
    bench = Bench.of(pair, "8/4")
    batch = prompts(3, low=2, high=9)
    joined = [bench.join(prompt, 10) for prompt in batch]
    rows = torch.tensor([sequence.row for sequence, _ in joined])
    lengths = torch.tensor([sequence.length for sequence, _ in joined])
    drafter = bench.decoder.drafter
    assert drafter is not None
    with torch.inference_mode():
        bonus = torch.tensor([sequence.bonus for sequence, _ in joined])
        found = drafter.logits(bonus, lengths, bench.decoder.table.prefix(rows, int(lengths.max())))
    for i, prompt in enumerate(batch):
        plain.target(prompt)
        near(found[i], plain.drafted(plain.features, joined[i][0].bonus))


@pytest.mark.parametrize("start", [0, 3, 6])
def test_scores_of_a_prompt_equal_an_independent_forward(pair: Path, plain: Plain, start: int) -> None:
    prompt = [4, 9, 2, 2, 15, 7, 3]
    bench = Bench.of(pair, "8/4")
    row = bench.decoder.table.allocate(len(prompt))
    assert row is not None
    logits = bench.decoder.prefill([Prompt(Sequence(row), prompt, start, False)])[0]
    tokens, top = logprobs.of_prompt(logits, prompt, start, 3)
    expected = plain.target(prompt).log_softmax(dim=-1)
    assert tokens[0] == (None, prompt[start]) and top[0] is None
    assert len(tokens) == len(top) == len(prompt) - start
    for place in range(1, len(tokens)):
        logprob, token = tokens[place]
        position = start + place
        assert token == prompt[position] and logprob is not None
        assert math.isclose(logprob, float(expected[position - 1, token]), abs_tol=2e-4)
        best = top[place]
        assert best is not None
        assert [t for _, t in best] == expected[position - 1].argsort(descending=True)[:3].tolist()


def test_without_top_there_are_no_alternatives(pair: Path) -> None:
    assert logprobs.of_prompt(torch.zeros(2, 16), [3, 4], 0, 0) == ([(None, 3), (pytest.approx(-math.log(16)), 4)], [])
