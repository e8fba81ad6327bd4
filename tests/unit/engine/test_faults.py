"""Every planted fault changes what it should, and nothing where it is documented to be harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from ddtree_ops.engine import measure
from ddtree_ops.engine.faults import Fault
from ddtree_ops.engine.request import GREEDY, Sampling
from ddtree_ops.engine.tree import Shape

from .conftest import prompts
from .pairs import Plain
from .test_cache import PAGE, SHARED, ask
from .test_sampling import MIXED
from .test_scheduler import Loop

TREE = "12/3"


@dataclass
class Evidence:
    """What a client can see: what was written and how it ended, and how it was computed."""

    tokens: list[list[int]] = field(default_factory=list)
    finish: list[object] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    shape: Shape | None = None

    def ask(
        self, loop: Loop, batch: list[list[int]], counts: list[int], asked: list[Sampling], **extra: object
    ) -> None:
        """Ask for a batch, all in flight together, and keep what came."""
        ids = [f"{len(loop.updates)}.{i}" for i in range(len(batch))]
        requests = [
            loop.request(rid, prompt, count, sampling=s, **extra)
            for rid, prompt, count, s in zip(ids, batch, counts, asked, strict=True)
        ]
        loop.scheduler.submit(requests)
        for update in loop.wait(*ids):
            self.tokens.append(update.output_ids)
            self.finish.append(update.finish)
            self.verified.append(update.verify_count)
            self.cached.append(update.cached_tokens)
        self.shape = loop.decoder.executed


Scenario = Callable[[Loop], Evidence]


@contextmanager
def running(pair: Path, mode: str, fault: Fault | None) -> Iterator[Loop]:
    loop = Loop(pair, mode, page_size=PAGE, fault=fault)
    loop.scheduler.start()
    yield loop
    loop.scheduler.stop("done")
    loop.scheduler.join(5)
    assert loop.scheduler.failure is None


@cache
def greedy(count: int) -> Scenario:
    """So many greedy requests at once."""

    def play(loop: Loop) -> Evidence:
        seen = Evidence()
        seen.ask(loop, SHARED[:count], [30] * count, [GREEDY] * count)
        return seen

    return play


def sampled(asked: list[Sampling]) -> Scenario:
    def play(loop: Loop) -> Evidence:
        seen = Evidence()
        seen.ask(loop, SHARED[: len(asked)], [30] * len(asked), asked)
        return seen

    return play


def stopping(loop: Loop) -> Evidence:
    seen = Evidence()
    for stop in range(2, 16):
        seen.ask(loop, SHARED, [20 + stop % 3] * 8, [GREEDY] * 8, stop_token_ids=frozenset({stop}))
    return seen


def at_the_limit(loop: Loop) -> Evidence:
    """Two requests run to the end of the context, a short text beside them goes on."""
    seen = Evidence()
    long = prompts(2, seed=41, low=60, high=60)
    seen.ask(loop, [long[0], [4, 9], long[1], [7]], [36, 90, 36, 90], [GREEDY] * 4)
    return seen


def lone_at_the_limit(loop: Loop) -> Evidence:
    seen = Evidence()
    seen.ask(loop, prompts(1, seed=41, low=60, high=60), [36], [GREEDY])
    return seen


def turns(loop: Loop) -> Evidence:
    """Two turns, the first of which fills its last page to the brim."""
    seen = Evidence()
    counts = [20 + (-len(prompt)) % PAGE for prompt in SHARED]
    seen.ask(loop, SHARED, counts, [GREEDY] * 8)
    second = [prompt + output + [5, 6] for prompt, output in zip(SHARED, seen.tokens, strict=True)]
    seen.ask(loop, second, [20] * 8, [GREEDY] * 8)
    return seen


def alike(loop: Loop) -> Evidence:
    """Texts that share the first token of a page and then part."""
    seen = Evidence()
    batch = [[2, 5, 6, 7, 3, i, i + 1, 9, 8] for i in range(2, 10)]
    for text in batch:
        seen.ask(loop, [text], [16], [GREEDY])
    return seen


def namespaces(loop: Loop) -> Evidence:
    seen = Evidence()
    for key in ("one", "two", "two"):
        seen.ask(loop, SHARED[:2], [9] * 2, [GREEDY] * 2, namespace=key)
    return seen


def after_an_abort(loop: Loop) -> Evidence:
    """Requests are aborted, others run, the first ones' prefixes are asked for again."""
    ids = [f"gone{i}" for i in range(8)]
    loop.scheduler.submit([loop.request(rid, p, 60, stream=True) for rid, p in zip(ids, SHARED, strict=True)])
    with loop.changed:
        assert loop.changed.wait_for(lambda: all(loop.updates[rid] for rid in ids), timeout=30)
    loop.scheduler.abort_all("gone")
    loop.wait(*ids)
    ask(loop, prompts(8, seed=43, low=20, high=40), 30)
    return greedy(8)(loop)


SAMPLED = sampled(MIXED)
TOP_K_AND_P = sampled([Sampling(1.5, top_k=4, top_p=0.7, seed=i) for i in range(8)])
MIN_P = sampled([Sampling(1.5, min_p=0.3, seed=i) for i in range(8)])
PENALISED = sampled([Sampling(0.0, repetition_penalty=2.0, frequency_penalty=2.0)] * 8)

CHANGES_TOKENS: list[tuple[Fault, Scenario]] = [
    (Fault.MASK_ROWS_BY_BLOCK_SIZE, greedy(1)),
    (Fault.MASK_OF_FIRST_REQUEST, greedy(2)),
    (Fault.MASK_ALL_BLOCKED, greedy(1)),
    (Fault.ROPE_BY_INDEX, greedy(1)),
    (Fault.STALE_KV, greedy(1)),
    (Fault.BONUS_KV_KEPT, turns),
    (Fault.BONUS_FROM_PARENT, greedy(1)),
    (Fault.WALK_PAST_MISMATCH, greedy(1)),
    (Fault.LENIENT_ACCEPTANCE, greedy(8)),
    (Fault.PAD_NODE_ACCEPTED, greedy(1)),
    (Fault.PADDED_ROWS_WRITE_LIVE_SLOTS, greedy(7)),
    (Fault.SLOT_REUSED_AFTER_ABORT, after_an_abort),
    (Fault.ROW_SPILL, at_the_limit),
    (Fault.CACHED_PREFIX_OF_ANOTHER, alike),
    (Fault.LOGITS_OF_ANOTHER, greedy(8)),
    (Fault.STOP_IN_PATH_IGNORED, stopping),
    (Fault.OVERLONG_OUTPUT, stopping),
    (Fault.TEMPERATURE_IGNORED, SAMPLED),
    (Fault.GREEDY_ROWS_SAMPLED, SAMPLED),
    (Fault.PARAMETERS_OF_NEIGHBOUR, SAMPLED),
    (Fault.FILTER_ORDER, TOP_K_AND_P),
    (Fault.MIN_P_IGNORED, MIN_P),
    (Fault.PENALTIES_FROZEN, PENALISED),
    (Fault.RANK_LOCAL_IDS, greedy(1)),
]

CHANGES_STRUCTURE: list[tuple[Fault, Scenario]] = [
    (Fault.DUPLICATE_SIBLINGS, greedy(8)),
    (Fault.BUDGET_CLAMPED, greedy(8)),
    (Fault.TOPK_IGNORED, greedy(8)),
    (Fault.DRAFT_HIDDEN_OF_WRONG_NODE, greedy(8)),
    (Fault.EXTRA_KEY_IGNORED, namespaces),
    (Fault.RANK_LOCAL_DRAFT_IDS, greedy(8)),
]

HARMLESS: list[tuple[Fault, str, Scenario]] = [
    # block_size is 5: at budget 4, and in the chain, rows a block apart are right.
    (Fault.MASK_ROWS_BY_BLOCK_SIZE, "4/3", greedy(2)),
    (Fault.MASK_ROWS_BY_BLOCK_SIZE, "DFLASH", greedy(2)),
    (Fault.MASK_OF_FIRST_REQUEST, TREE, greedy(1)),
    (Fault.MASK_OF_FIRST_REQUEST, "DFLASH", greedy(8)),
    # Without branches node index and depth are one, and a path lies where it is to be committed.
    (Fault.ROPE_BY_INDEX, "DFLASH", greedy(2)),
    (Fault.ROPE_BY_INDEX, "9/1", greedy(2)),
    (Fault.STALE_KV, "DFLASH", greedy(2)),
    (Fault.STALE_KV, "9/1", greedy(2)),
    (Fault.DRAFT_HIDDEN_OF_WRONG_NODE, "DFLASH", greedy(2)),
    (Fault.DRAFT_HIDDEN_OF_WRONG_NODE, "9/1", greedy(2)),
    (Fault.DUPLICATE_SIBLINGS, "DFLASH", greedy(2)),
    (Fault.DUPLICATE_SIBLINGS, "9/1", greedy(2)),
    (Fault.TOPK_IGNORED, "9/1", greedy(2)),
    (Fault.BUDGET_CLAMPED, "4/3", greedy(2)),
    (Fault.PADDED_ROWS_WRITE_LIVE_SLOTS, TREE, greedy(2)),
    (Fault.LOGITS_OF_ANOTHER, TREE, greedy(7)),
    (Fault.ROW_SPILL, TREE, lone_at_the_limit),
    (Fault.ROW_SPILL, TREE, greedy(8)),
    (Fault.BONUS_KV_KEPT, TREE, greedy(8)),
    (Fault.SLOT_REUSED_AFTER_ABORT, TREE, turns),
    (Fault.TEMPERATURE_IGNORED, TREE, greedy(8)),
    (Fault.GREEDY_ROWS_SAMPLED, TREE, PENALISED),
    (Fault.PARAMETERS_OF_NEIGHBOUR, TREE, PENALISED),
    (Fault.FILTER_ORDER, TREE, MIN_P),
    (Fault.MIN_P_IGNORED, TREE, TOP_K_AND_P),
    (Fault.PENALTIES_FROZEN, TREE, TOP_K_AND_P),
]


@cache  # many faults are compared with the same healthy evidence; nobody writes into it
def see(pair: Path, mode: str, fault: Fault | None, scenario: Scenario) -> Evidence:
    with running(pair, mode, fault) as loop:
        return scenario(loop)


def test_every_fault_has_a_test() -> None:
    assert sorted(fault for fault, _ in CHANGES_TOKENS + CHANGES_STRUCTURE) == sorted(Fault)


@pytest.mark.parametrize("fault, scenario", CHANGES_TOKENS, ids=lambda value: value if isinstance(value, Fault) else "")
def test_a_fault_changes_what_is_written(pair: Path, fault: Fault, scenario: Scenario) -> None:
    healthy, planted = see(pair, TREE, None, scenario), see(pair, TREE, fault, scenario)
    assert planted.tokens != healthy.tokens


@pytest.mark.parametrize(
    "fault, scenario", CHANGES_STRUCTURE, ids=lambda value: value if isinstance(value, Fault) else ""
)
def test_a_fault_that_changes_no_token_shows_in_what_was_executed(pair: Path, fault: Fault, scenario: Scenario) -> None:
    healthy, planted = see(pair, TREE, None, scenario), see(pair, TREE, fault, scenario)
    assert planted.tokens == healthy.tokens
    if fault is Fault.EXTRA_KEY_IGNORED:
        assert [bool(n) for n in healthy.cached] == [False] * 4 + [True] * 2
        assert all(planted.cached[2:])
        return
    assert planted.verified != healthy.verified
    assert healthy.shape == Shape(12, healthy.shape.max_children if healthy.shape else 0, 4)
    assert planted.shape is not None
    if fault is Fault.BUDGET_CLAMPED:
        assert planted.shape.nodes == 4
    if fault is Fault.TOPK_IGNORED:
        assert (planted.shape.nodes, planted.shape.max_children) == (4, 1)
    if fault is Fault.DUPLICATE_SIBLINGS:
        assert planted.shape.nodes < 12


def test_with_a_drafter_that_was_trained_such_a_fault_costs_acceptance(trained: Path) -> None:
    """The tiny drafter knows nothing, so whatever it hears, it is right as often; this one knows what it hears."""
    batch = [row.prompt for row in measure.read_rows(trained / "held_out.json")[:8]]

    def play(loop: Loop) -> Evidence:
        seen = Evidence()
        seen.ask(loop, batch, [32] * 8, [GREEDY] * 8)
        return seen

    healthy = see(trained, TREE, None, play)
    for fault in {fault for fault, _ in CHANGES_STRUCTURE} - {Fault.EXTRA_KEY_IGNORED}:
        planted = see(trained, TREE, fault, play)
        assert planted.tokens == healthy.tokens
        assert sum(planted.verified) > sum(healthy.verified), fault


@pytest.mark.parametrize(
    "fault, mode, scenario", HARMLESS, ids=[f"{i}-{fault}" for i, (fault, _, _) in enumerate(HARMLESS)]
)
def test_a_fault_is_hidden_where_it_is_documented_to_be(
    pair: Path, fault: Fault, mode: str, scenario: Scenario
) -> None:
    assert see(pair, mode, fault, scenario) == see(pair, mode, None, scenario)


def test_the_healthy_engine_writes_the_targets_tokens_in_all_greedy_scenarios(pair: Path, plain: Plain) -> None:
    assert see(pair, TREE, None, greedy(8)).tokens == [plain.greedy(prompt, 30) for prompt in SHARED]
    assert see(pair, TREE, None, after_an_abort).tokens == [plain.greedy(prompt, 30) for prompt in SHARED]
    long = prompts(2, seed=41, low=60, high=60)
    expected = [plain.greedy(long[0], 36), plain.greedy([4, 9], 90), plain.greedy(long[1], 36), plain.greedy([7], 90)]
    assert see(pair, TREE, None, at_the_limit).tokens == expected
    two = see(pair, TREE, None, turns)
    for prompt, first, second in zip(SHARED, two.tokens[:8], two.tokens[8:], strict=True):
        assert second == plain.greedy(prompt + first + [5, 6], 20)


def test_a_bonus_kept_too_early_is_wrong_in_the_second_turn_only(pair: Path) -> None:
    healthy, planted = see(pair, TREE, None, turns), see(pair, TREE, Fault.BONUS_KV_KEPT, turns)
    assert planted.tokens[:8] == healthy.tokens[:8] and planted.tokens[8:] != healthy.tokens[8:]


def test_an_ignored_temperature_is_greedy(pair: Path) -> None:
    asked = sampled([Sampling(1.5, seed=i) for i in range(8)])
    planted, cold = see(pair, TREE, Fault.TEMPERATURE_IGNORED, asked), see(pair, TREE, None, greedy(8))
    # The first token comes from the prefill, which samples.
    same = [a for a, b in zip(planted.tokens, cold.tokens, strict=True) if a[0] == b[0]]
    assert same and all(a in cold.tokens for a in same)


def test_what_goes_on_behind_a_stop_or_the_limit(pair: Path) -> None:
    healthy, late = see(pair, TREE, None, stopping), see(pair, TREE, Fault.OVERLONG_OUTPUT, stopping)
    limits = [20 + stop % 3 for stop in range(2, 16) for _ in SHARED]
    assert not any(len(tokens) > limit for tokens, limit in zip(healthy.tokens, limits, strict=True))
    assert any(len(tokens) > limit for tokens, limit in zip(late.tokens, limits, strict=True))
    missed = see(pair, TREE, Fault.STOP_IN_PATH_IGNORED, stopping)
    assert sum(map(len, missed.tokens)) > sum(map(len, healthy.tokens))
