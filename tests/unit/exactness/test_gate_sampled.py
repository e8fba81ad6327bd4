"""Above temperature 0: the same tokens from the same seeds, and the target's own law."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.exactness import GatePlan, Kind, Verdict, builtin_prompts, distribution, golden, run_gate, sameseed
from ddtree_ops.exactness.plan import Tree
from ddtree_ops.exactness.wire import Entry
from tests.unit.exactness.test_gate_engine import PAIR, TREE, engine
from tests.unit.exactness.test_gate_engine import plan as engine_plan
from tests.unit.exactness.test_gate_golden import IDENTITY
from tests.unit.exactness.toy import VOCAB, Json, Toy

pytestmark = pytest.mark.slow

Make = Callable[..., GatePlan]
LAW = (0.5, 0.2, 0.15, 0.1, 0.05)


def codes(verdict: Verdict, effect: str) -> set[str]:
    return {reason.code for reason in verdict.reasons if reason.effect == effect}


def entry(token: int, law: tuple[float, ...] = LAW) -> Entry:
    """The score of ``token`` where token i has the i-th probability."""
    top = tuple((math.log(p), i, "") for i, p in enumerate(law))
    return Entry(token=token, logprob=math.log(law[token]), text="", top=top)


def drawn(law: tuple[float, ...], count: int, seed: int, scored: tuple[float, ...] = LAW) -> distribution.Pools:
    pools, noise = distribution.Pools(), random.Random(seed)
    for token in noise.choices(range(len(law)), law, k=count):
        place = distribution.interval(entry(token, scored), {"temperature": 1.0, "top_k": 5}, 0.0)
        assert place is not None
        pools.add(place[0] + noise.random() * (place[1] - place[0]), ("all tokens",))
    return pools


@pytest.mark.parametrize(
    ("parameters", "places"),
    [
        ({"temperature": 1.0, "top_k": 5}, [(0.0, 0.5), (0.5, 0.7), (0.7, 0.85), (0.85, 0.95), (0.95, 1.0)]),
        ({"temperature": 1.0, "top_k": 2}, [(0.0, 5 / 7), (5 / 7, 1.0), None, None, None]),
        # joint: a token stays while the mass before it is not above top_p, whatever top_k has left of the law
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.6}, [(0.0, 5 / 7), (5 / 7, 1.0), None, None, None]),
        (
            {"temperature": 1.0, "top_k": 5, "min_p": 0.25},
            [(0.0, 10 / 17), (10 / 17, 14 / 17), (14 / 17, 1.0), None, None],
        ),
    ],
)
def test_a_tokens_place_in_the_filtered_law(parameters: Any, places: list[tuple[float, float] | None]) -> None:
    for token, wanted in enumerate(places):
        found = distribution.interval(entry(token), parameters, 0.0)
        assert found == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize(
    ("token", "before", "penalty", "gap"),
    [
        (0, (), 0.0, 0.0),
        (1, (), 0.0, math.log(0.5 / 0.2)),
        (0, (0,), 0.0, 0.0),
        (1, (0,), 2.0, 0.0),
        (0, (0,), 2.0, 2.0 - math.log(0.5 / 0.2)),
        (2, (0, 1, 1), 1.0, math.log(0.5 / 0.15) - 1.0),
    ],
)
def test_a_greedy_tokens_gap_under_the_penalties_of_what_came_before(
    token: int, before: tuple[int, ...], penalty: float, gap: float
) -> None:
    found = distribution.greedy(entry(token), 3, before, {"temperature": 0.0, "frequency_penalty": penalty})
    assert found.gap == pytest.approx(gap) and (found.index, found.emitted) == (3, token)


def test_a_temperature_sharpens_the_law() -> None:
    found = distribution.interval(entry(0), {"temperature": 0.5, "top_k": 5}, 0.0)
    assert found == pytest.approx((0.0, 0.25 / sum(p * p for p in LAW)))


def test_a_token_just_beyond_a_filters_edge_is_not_outside() -> None:
    law = (0.5, 0.2501, 0.2499)
    assert distribution.interval(entry(2, law), {"temperature": 1.0, "top_k": 2}, 0.0) is None
    assert distribution.interval(entry(2, law), {"temperature": 1.0, "top_k": 2}, 0.01) is not None


def test_the_own_law_keeps_within_the_bound_and_another_does_not() -> None:
    """200 healthy runs: the bound is meant to be missed once in 1,000."""
    for seed in range(200):
        (one,) = distribution.tested(drawn(LAW, 1000, seed), "float32")
        assert one.distance <= one.bound == pytest.approx(math.sqrt(math.log(2000) / 2000))
    other = (0.65, 0.1, 0.1, 0.1, 0.05)
    for seed in range(20):
        (one,) = distribution.tested(drawn(other, 1000, seed), "float32")
        assert one.distance > one.bound


def test_half_precision_gets_its_slack() -> None:
    pools = drawn(LAW, 1000, 1)
    (full,), (half,) = distribution.tested(pools, "float32"), distribution.tested(pools, "bfloat16")
    assert half.bound == pytest.approx(full.bound + 0.03)


def test_neighbours_have_other_parameters_and_every_prompt_its_own_seed() -> None:
    made = [sameseed.parameters(row, f"p{row}") for row in range(16)]
    assert len({made[i]["sampling_seed"] for i in range(16)}) == 16
    assert all(sameseed.TABLE[i] != sameseed.TABLE[i - 1] for i in range(len(sameseed.TABLE)))
    assert sum(not row["temperature"] for row in sameseed.TABLE) == 2


def test_same_seed_needs_something_to_compare_with(plan: Make) -> None:
    with pytest.raises(UsageError, match="same-seed without a golden or a baseline"):
        run_gate(plan(methods=("same-seed",)))


def test_a_server_without_positional_seeds_gives_no_verdict(toy: Toy, plan: Make) -> None:
    count = 0

    def alter(kind: str, request: Json, reply: Json) -> Json:
        nonlocal count
        if kind == "generate" and request["sampling_params"].get("temperature"):
            count += 1
            reply["output_ids"][-1] = count % 100
        return reply

    toy.alter = alter
    recorded = golden.Golden(format=1, identity=IDENTITY, prompts={}, sampling=sameseed.VERSION, sampled={})
    verdict = run_gate(plan(methods=("same-seed",), golden=recorded))
    assert verdict.kind is Kind.INCONCLUSIVE and "no-seeds" in codes(verdict, "inconclusive")


@pytest.mark.parametrize(
    ("words", "kind"),
    [("DDTREE does not support frequency_penalty yet.", Kind.EXACT), ("out of memory", Kind.INCONCLUSIVE)],
)
def test_refused_penalties_are_said_and_other_refusals_are_trouble(
    words: str, kind: Kind, toy: Toy, plan: Make
) -> None:
    def alter(kind: str, request: Json, reply: Json) -> Json | str:
        penalised = kind == "generate" and "frequency_penalty" in request["sampling_params"]
        return f"400 {words}" if penalised else reply

    other = Toy()
    other.info = {"vocab_size": VOCAB}
    toy.alter = alter
    try:
        verdict = run_gate(plan(methods=("self-score", "same-seed"), baseline=other.url))
    finally:
        other.close()
    assert verdict.kind is kind, "\n".join(verdict.lines())
    assert ("penalties-refused" in codes(verdict, "note")) == (kind is Kind.EXACT)
    assert kind is not Kind.EXACT or any(m.judged for m in verdict.methods if m.method == "same-seed")


def test_a_golden_of_another_table_gives_no_verdict(plan: Make) -> None:
    recorded = golden.Golden(format=1, identity=IDENTITY, prompts={}, sampling="sampling-v0")
    verdict = run_gate(plan(methods=("same-seed",), golden=recorded))
    assert verdict.kind is Kind.INCONCLUSIVE and "no-sampled" in codes(verdict, "inconclusive")
    verdict = run_gate(plan(methods=("same-seed",), golden=recorded, dtype="bfloat16", policy="near-tie"))
    assert verdict.kind is Kind.INCONCLUSIVE and "same-seed-dtype" in codes(verdict, "inconclusive")


@pytest.fixture(scope="module")
def baseline() -> Iterator[str]:
    if not PAIR.is_dir():
        pytest.skip("the tiny pair is not in this checkout")
    with engine() as url:
        yield url


def sampled(url: str, **changes: Any) -> GatePlan:
    fields = {"methods": ("same-seed", "distribution"), "tree": Tree(block_size=8, budget=8, topk=4)}
    return engine_plan(url, "ddtree", prompts=builtin_prompts()[:16], second_turn_tokens=0, **(fields | changes))


def test_a_healthy_engine_draws_ars_tokens_by_the_targets_law(baseline: str) -> None:
    with engine(*TREE) as url:
        verdict = run_gate(sampled(url, baseline=baseline))
    assert verdict.kind is Kind.EXACT, "\n".join(verdict.lines())
    assert {m.method for m in verdict.methods if m.judged} >= {"same-seed", "distribution", "baseline", "self-score"}
    power = next(reason.message for reason in verdict.reasons if reason.code == "distribution-power")
    assert "N = " in power and "is found with probability 0.99" in power


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("temperature-ignored", {"distribution"}),
        ("min-p-ignored", {"outside-support"}),
        ("parameters-of-neighbour", {"outside-support"}),
        ("greedy-rows-sampled", set()),
        ("penalties-frozen", set()),
        ("filter-order", set()),
    ],
)
def test_faults_that_only_sampling_shows(baseline: str, fault: str, seen: set[str]) -> None:
    with engine(*TREE, "--fault", fault) as url:
        verdict = run_gate(sampled(url, baseline=baseline, mixed=False, max_new_tokens=32))
    assert verdict.kind is Kind.FAIL
    assert any(f.method == "same-seed" and f.severity == "fail" for f in verdict.findings)
    assert codes(verdict, "fail") >= seen
