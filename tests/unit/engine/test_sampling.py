"""Sampling: the filters and penalties as written down, and the same seed giving AR's tokens whatever was drafted."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree_ops.engine import measure
from ddtree_ops.engine import sampling as draws
from ddtree_ops.engine.request import GREEDY, Sampling
from ddtree_ops.engine.step import Prompt, Sequence
from ddtree_ops.engine.walk import rejection_path

from .conftest import MODES, Bench, prompts
from .pairs import VOCABULARY

pytestmark = pytest.mark.slow

COUNT = 36

MIXED = [
    GREEDY,
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=4, seed=2),
    Sampling(1.3, top_p=0.8, seed=3),
    Sampling(1.5, min_p=0.2, seed=-4),
    Sampling(1.2, top_k=9, top_p=0.9, min_p=0.05, seed=5),
    Sampling(0.9, frequency_penalty=0.5, presence_penalty=-0.4, repetition_penalty=1.3, seed=6),
    Sampling(repetition_penalty=1.8, frequency_penalty=0.7),
]


def by_definition(logits: list[float], s: Sampling) -> list[float]:
    """The filtered distribution, token by token in plain floats."""
    largest = max(logits)
    weights = [math.exp((x - largest) / s.temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept, before = [0.0] * len(p), 0.0
    for rank, token in enumerate(order):
        if (s.top_k < 0 or rank < s.top_k) and before <= s.top_p and p[token] >= s.min_p * p[order[0]]:
            kept[token] = p[token]
        before += p[token]
    return kept


@pytest.mark.parametrize("s", MIXED[1:6], ids=str)
def test_filters_keep_what_the_definition_keeps(s: Sampling) -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)) * 3
    found = draws.filtered(draws.tempered(logits, s), s)
    for row, scores in zip(found.tolist(), logits.tolist(), strict=True):
        assert row == pytest.approx(by_definition(scores, s), abs=1e-6)


def test_top_k_and_top_p_are_joint_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of top-k's own mass 0.7, the first token's 0.4 would be 0.57 and top_p 0.5 would leave it alone.
    assert (draws.filtered(logits, Sampling(1.0, top_k=2, top_p=0.5)) > 0).tolist() == [[True, True, False, False]]
    assert (draws.filtered(torch.zeros(1, 4), Sampling(1.0, top_k=2)) > 0).tolist() == [[True, True, False, False]]
    assert (draws.filtered(logits, Sampling(1.0, top_p=1e-9)) > 0).sum() == 1


def test_penalties_add_first_and_then_scale_by_sign() -> None:
    s = Sampling(1.0, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    logits = torch.tensor([[4.0, 0.5, -1.0, 3.0], [4.0, 0.5, -1.0, 3.0]], dtype=torch.bfloat16)
    found = draws.penalised(logits, [[0, 1, 1, 2], []], s)
    assert found.tolist() == [[(4 - 0.75) / 2, (0.5 - 1.25) * 2, -1.75 * 2, 3.0], [4.0, 0.5, -1.0, 3.0]]


def test_draws_follow_the_weights_and_depend_on_seed_and_position_alone() -> None:
    """Chi-square of 20,000 draws against four weights: 3 degrees of freedom, a false alarm below 1e-6 at 31."""
    weights, n = torch.tensor([[0.05, 0.1, 0.25, 0.1]], dtype=torch.float64), 20_000
    for drawn in (
        draws.draw(weights.expand(n, -1), 7, range(n)),
        [draws.draw(weights, seed, [3])[0] for seed in range(n)],
    ):
        counts = Counter(drawn)
        expected = (weights[0] / weights.sum() * n).tolist()
        assert sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected)) < 31
    assert draws.draw(weights, 7, [11]) == draws.draw(weights.expand(9, -1), 7, range(5, 14))[6:7]
    assert draws.draw(weights.expand(99, -1), 7, range(99)) != draws.draw(weights.expand(99, -1), 8, range(99))


def test_coins_are_uniform_and_no_ones_noise() -> None:
    thrown = [coin for position in range(2000) for coin in draws.coins(5, position, 3)]
    assert all(0 < coin < 1 for coin in thrown) and len(set(thrown)) == len(thrown)
    assert abs(sum(thrown) / len(thrown) - 0.5) < 5 * math.sqrt(1 / 12 / len(thrown))


def generate(bench: Bench, asked: list[Sampling], joining: random.Random | None = None) -> list[list[int]]:
    """Outputs of as many prompts; with `joining`, they join at random steps."""
    batch = prompts(len(asked), seed=12)
    outputs: list[list[int]] = [[] for _ in batch]
    waiting = list(range(len(batch)))
    running: dict[int, Sequence] = {}
    while waiting or running:
        while waiting and (not running or joining is None or joining.random() < 0.3):
            index = waiting.pop(0)
            running[index], outputs[index] = bench.join(batch[index], COUNT, asked[index])
        order = list(running)
        for index, gained in zip(order, bench.decoder.step([running[i] for i in order]).tokens, strict=True):
            outputs[index] += gained
            assert running[index].output == outputs[index]
            if len(outputs[index]) >= COUNT:
                bench.decoder.table.release(running.pop(index).row)
    return [output[:COUNT] for output in outputs]


@pytest.fixture(scope="module")
def expected(pair: Path) -> list[list[int]]:
    """AR's tokens, one request at a time and every text prefilled anew, by the plain definition."""
    bench, found = Bench.of(pair, "AR"), []
    for prompt, s in zip(prompts(len(MIXED), seed=12), MIXED, strict=True):
        output: list[int] = []
        while len(output) < COUNT:
            row = bench.decoder.table.allocate(len(prompt) + len(output))
            assert row is not None
            text = prompt + output
            (logits,) = bench.decoder.prefill([Prompt(Sequence(row), text, len(text) - 1, False)])
            bench.decoder.table.release(row)
            if s.penalises:
                logits = draws.penalised(logits, [output], s)
            if s.greedy:
                output.append(int(logits.argmax()))
            else:
                kept = torch.tensor([by_definition(logits[0].tolist(), s)], dtype=torch.float64)
                output += draws.draw(kept, s.seed, [len(text) - 1])
        found.append(output)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_one_seed_gives_one_text_in_every_mode_alone_and_in_a_mixed_batch(
    pair: Path, expected: list[list[int]], mode: str
) -> None:
    bench = Bench.of(pair, mode)
    assert generate(bench, MIXED) == expected
    assert generate(bench, MIXED, random.Random(3)) == expected
    for prompt, s, tokens in zip(prompts(len(MIXED), seed=12), MIXED, expected, strict=True):
        sequence, output = bench.join(prompt, COUNT, s)
        while len(output) < COUNT:
            output += bench.decoder.step([sequence]).tokens[0]
        assert output[:COUNT] == tokens
        bench.decoder.table.release(sequence.row)


@pytest.mark.parametrize("mode", ["DFLASH", "16/4"])
def test_the_trained_pair_draws_ars_tokens_too(trained: Path, mode: str) -> None:
    """A vocabulary of 2,048, real acceptance: eight at once against AR's eight."""
    rows = [row.prompt for row in measure.read_rows(trained / "held_out.json")[:8]]
    asked = [Sampling(1.0, top_p=0.95, seed=i) if i % 3 else MIXED[i] for i in range(8)]
    outputs: list[list[list[int]]] = []
    steps = []
    for each in ("AR", mode):
        bench = Bench.of(trained, each)
        running = [bench.join(prompt, 2 * COUNT, s)[0] for prompt, s in zip(rows, asked, strict=True)]
        steps.append(0)
        while any(len(sequence.output) < COUNT for sequence in running):
            bench.decoder.step(running)
            steps[-1] += 1
        outputs.append([sequence.output[:COUNT] for sequence in running])
    assert outputs[0] == outputs[1]
    assert steps[1] < steps[0]


def test_the_seeds_and_parameters_of_that_test_matter(expected: list[list[int]], pair: Path) -> None:
    plain = generate(Bench.of(pair, "AR"), [GREEDY] * len(MIXED))
    assert plain[0] == expected[0] and all(a != b for a, b in zip(plain[1:], expected[1:], strict=True))
    other = generate(Bench.of(pair, "AR"), [Sampling(s.temperature, seed=s.seed + 1) for s in MIXED[1:6]])
    assert len({tuple(output) for output in other}) == 5


def test_a_step_returns_the_logits_that_were_sampled_from(pair: Path) -> None:
    bench, s = Bench.of(pair, "8/4"), Sampling(0.5, repetition_penalty=1.5, seed=4)
    sequence, _ = bench.join([4, 5, 6], COUNT, s)
    greedy, _ = bench.join([4, 5, 6], COUNT)
    before, bonus = list(sequence.output), sequence.length
    result = bench.decoder.step([greedy, sequence])
    row = bench.decoder.table.allocate(4)
    assert row is not None
    (raw,) = bench.decoder.prefill([Prompt(Sequence(row), [4, 5, 6, before[0]], 3, False)])
    wanted = draws.tempered(draws.penalised(raw, [before], s), s)
    assert torch.allclose(result.logits[result.rows[1][:1]], wanted, atol=1e-4)
    assert draws.draw(draws.filtered(wanted, s), s.seed, [bonus]) == result.tokens[1][:1]
    assert result.logits[result.rows[0]].argmax(dim=-1).tolist() == result.tokens[0]


def test_rejection_takes_children_by_their_weight_and_strikes_those_refused() -> None:
    q = [[0.0, 0.5, 0.3, 0.2], [0.25] * 4, [0.1, 0.0, 0.0, 0.9]]
    parent, token = [0, 0, 0], [0, 1, 2]
    assert rejection_path(parent, token, q, lambda node, n: [0.49, 0.0][:n]) == ([0, 1], q[1])
    assert rejection_path(parent, token, q, lambda node, n: [0.51, 0.59][:n]) == ([0, 2], q[2])
    assert rejection_path(parent, token, q, lambda node, n: [0.51, 0.61][:n]) == ([0], [0.0, 0.0, 0.0, 0.2])
    assert rejection_path([0], [1], q[:1], lambda node, n: []) == ([0], q[0])


def deviation(pair: Path, mode: str, **extra: object) -> float:
    """How many standard deviations (Wilson-Hilferty) chi-square lies above its mean, over 2,400 texts of one prompt.

    The cells are (text so far, next token) for the second and third output token, expected from the target's own
    filtered distribution of a fresh prefill. Within a context the draft is the same every time: a method that favours
    drafted tokens has nowhere to hide.
    """
    bench, judge = Bench.of(pair, mode, max_running_requests=60, **extra), Bench.of(pair, "AR")
    sampled, prompt, followers = Sampling(3.0, top_k=5, top_p=0.97), [4, 9, 2], dict[tuple[int, ...], Counter[int]]()
    for first in range(0, 2400, 60):
        running = bench.join_all(prompt, 12, [replace(sampled, seed=first + i) for i in range(60)])
        while any(len(sequence.output) < 3 for sequence in running):
            bench.decoder.step(running)
        for sequence in running:
            bench.decoder.table.release(sequence.row)
            for length in (1, 2):
                context = tuple(sequence.output[:length])
                followers.setdefault(context, Counter())[sequence.output[length]] += 1
    total, freedom = 0.0, 0
    for context, counts in followers.items():
        row = judge.decoder.table.allocate(len(prompt) + len(context))
        assert row is not None
        text = [*prompt, *context]
        (logits,) = judge.decoder.prefill([Prompt(Sequence(row), text, len(text) - 1, False)])
        judge.decoder.table.release(row)
        weights = draws.filtered(draws.tempered(logits, sampled), sampled)[0]
        shares = (weights / weights.sum()).tolist()
        assert all(shares[token] > 0 for token in counts), "a token outside the filters"
        expected = {token: share * counts.total() for token, share in enumerate(shares) if share > 0}
        if len(expected) > 1 and min(expected.values()) >= 5:
            total += sum((counts[token] - e) ** 2 / e for token, e in expected.items())
            freedom += len(expected) - 1
    assert freedom >= 30
    spread = 2 / (9 * freedom)
    return ((total / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("method", ["per-node", "rejection"])
@pytest.mark.parametrize("mode", ["DFLASH", "12/3"])
def test_both_methods_leave_the_targets_distribution(pair: Path, mode: str, method: str) -> None:
    """Seeds are fixed, so this cannot flicker; for other seeds a false alarm (5 deviations) has probability 3e-7."""
    assert deviation(pair, mode, speculative_sampling=method) < 5


def test_the_distribution_test_sees_a_walk_that_prefers_the_draft(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins half as large, as with an acceptance threshold below 1: the method is biased, and it shows."""
    fair = draws.coins
    monkeypatch.setattr(draws, "coins", lambda *where: [coin / 2 for coin in fair(*where)])
    assert deviation(pair, "12/3", speculative_sampling="rejection") > 8


def test_rejection_is_another_method_and_greedy_is_none_of_its_business(pair: Path, expected: list[list[int]]) -> None:
    found = generate(Bench.of(pair, "8/4", speculative_sampling="rejection"), MIXED)
    assert found[0] == expected[0] and found[7] == expected[7]
    assert sum(a != b for a, b in zip(found[1:7], expected[1:7], strict=True)) >= 4
    assert all(0 <= token < VOCABULARY for output in found for token in output)
