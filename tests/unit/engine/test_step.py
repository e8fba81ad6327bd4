"""Steps: exactness of every mode, the commit of a path with gaps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ddtree_ops.engine.step import Decoder, Prompt, Sequence, candidates
from ddtree_ops.engine.verify import NumericError

from .conftest import MODES, Bench, prompts
from .pairs import Plain, write_pair

COUNT = 40


@pytest.fixture(scope="session")
def expected(plain: Plain) -> list[list[int]]:
    """The target's own continuation of every prompt, from scratch in float64."""
    return [plain.greedy(prompt, COUNT) for prompt in prompts(8)]


def decode(bench: Bench, count: int, joining: random.Random | None = None) -> list[list[int]]:
    """Outputs of the eight prompts; with `joining`, they join at random steps and so leave at others."""
    batch = prompts(8)
    outputs: list[list[int]] = [[] for _ in batch]
    waiting = list(enumerate(batch))
    running: dict[int, Sequence] = {}
    while waiting or running:
        while waiting and (not running or joining is None or joining.random() < 0.3):
            index, prompt = waiting.pop(0)
            running[index], outputs[index] = bench.join(prompt, count)
        order = list(running)
        for index, gained in zip(order, bench.decoder.step([running[i] for i in order]).tokens, strict=True):
            outputs[index] += gained
            if len(outputs[index]) >= count:
                bench.decoder.table.release(running.pop(index).row)
    return [output[:count] for output in outputs]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_writes_the_targets_own_tokens(pair: Path, expected: list[list[int]], mode: str) -> None:
    bench = Bench.of(pair, mode)
    free = bench.decoder.table.free
    assert decode(bench, COUNT) == expected
    assert decode(bench, COUNT, random.Random(1)) == expected
    assert bench.decoder.table.free == free


@pytest.mark.parametrize("mode", MODES)
def test_alone_a_request_gets_the_same_tokens(pair: Path, expected: list[list[int]], mode: str) -> None:
    bench = Bench.of(pair, mode)
    for prompt, tokens in zip(prompts(3), expected, strict=False):
        sequence, output = bench.join(prompt, COUNT)
        while len(output) < COUNT:
            output += bench.decoder.step([sequence]).tokens[0]
        assert output[:COUNT] == tokens
        bench.decoder.table.release(sequence.row)


@pytest.mark.parametrize("seed", [21, 22])
def test_other_random_pairs_agree_too(tmp_path: Path, seed: int) -> None:
    pair = write_pair(tmp_path / "pair", seed=seed, tied=False)
    wanted = decode(Bench.of(pair, "AR"), COUNT)
    for mode in ("DFLASH", "4/3", "12/3"):
        assert decode(Bench.of(pair, mode), COUNT) == wanted


def test_a_path_with_gaps_commits_what_a_fresh_prefill_would(pair: Path) -> None:
    """KV of target and drafter after steps equals that of prefilling the same tokens, and paths did have gaps."""
    bench = Bench.of(pair, "60/12")
    gaps = 0
    for prompt in prompts(6, seed=9):
        sequence, output = bench.join(prompt, COUNT)
        while len(output) < COUNT:
            result = bench.decoder.step([sequence])
            gaps += result.rows[0] != list(range(len(result.rows[0])))
            output += result.tokens[0]
        fresh, _ = bench.join((prompt + output)[: sequence.length], 0)
        assert fresh.length == sequence.length
        for found, wanted in zip(memory(bench.decoder, sequence), memory(bench.decoder, fresh), strict=True):
            assert_close(found, wanted, atol=2e-3, rtol=2e-3)
        bench.decoder.table.release(sequence.row)
        bench.decoder.table.release(fresh.row)
    assert gaps >= 20


def memory(decoder: Decoder, sequence: Sequence) -> list[torch.Tensor]:
    """Keys and values of every layer of both models, over the committed tokens."""
    slots = decoder.table.prefix(torch.tensor([sequence.row]), sequence.length)
    drafter = decoder.drafter
    assert drafter is not None
    pools = [(decoder.trunk.pool, 4), (drafter._pool, 2)]
    return [part for pool, layers in pools for layer in range(layers) for part in pool.read(layer, slots)]


def test_logits_rows_are_those_that_chose_the_tokens(pair: Path) -> None:
    bench = Bench.of(pair, "8/4")
    joined = [bench.join(prompt, COUNT)[0] for prompt in prompts(4)]
    for _ in range(5):
        result = bench.decoder.step(joined)
        for tokens, rows in zip(result.tokens, result.rows, strict=True):
            assert result.logits[rows].argmax(dim=-1).tolist() == tokens


def test_what_was_executed_is_measured(pair: Path) -> None:
    for mode, nodes in (("AR", 0), ("DFLASH", 4), ("8/4", 8), ("9/1", 4), ("2/2", 2)):
        bench = Bench.of(pair, mode)
        assert bench.decoder.executed is None
        bench.decoder.step([bench.join([4, 5], 9)[0]])
        shape = bench.decoder.executed
        assert shape is not None and shape.nodes == nodes
        assert bench.width == nodes + 1
        if mode == "DFLASH":
            assert (shape.max_children, shape.max_depth) == (1, 4)


def test_candidates_break_ties_by_lower_id() -> None:
    values, ids = candidates(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 2)
    assert ids.tolist() == [[1, 2], [0, 1]] and values.tolist() == [[3.0, 3.0], [0.0, 0.0]]
    values, ids = candidates(torch.tensor([[1.0, 3.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 2, 0]]


def test_logits_that_are_not_finite_stop_the_engine(pair: Path) -> None:
    bench = Bench.of(pair, "8/4")
    sequence, _ = bench.join([4, 5, 6], 9)
    bench.decoder.trunk.pool._data.fill_(float("nan"))
    with pytest.raises(NumericError):
        bench.decoder.step([sequence])


def test_slots_are_refused_when_they_can_never_fit_and_awaited_when_they_may(pair: Path) -> None:
    table = Bench.of(pair, "AR", max_total_tokens=50, max_running_requests=2).decoder.table
    with pytest.raises(ValueError, match="51 slots"):
        table.allocate(51)
    first = table.allocate(30)
    assert first is not None and table.allocate(21) is None
    second = table.allocate(20)
    assert second is not None and table.allocate(0) is None
    table.release(first)
    with pytest.raises(KeyError):
        table.release(first)
    assert table.free == 30


def test_prefill_for_scoring_leaves_the_drafter_alone(pair: Path) -> None:
    bench = Bench.of(pair, "8/4")
    drafter = bench.decoder.drafter
    assert drafter is not None
    row = bench.decoder.table.allocate(3)
    assert row is not None
    bench.decoder.prefill([Prompt(Sequence(row), [4, 5, 6], 0, False)])
    assert not drafter._pool._data.any()
    bench.join([4, 5, 6], 4)
    assert drafter._pool._data.any()
