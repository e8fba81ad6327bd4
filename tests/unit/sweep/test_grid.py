"""Given wishes and what is done, which starts come and in what order; and the journal that remembers it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.errors import Locked, UsageError
from ddtree_ops.model import init_workspace, load_workspace, profile_to_json, resolve
from ddtree_ops.sweep.grid import AR, CHAIN, Cell, Load, Shape, parse_shapes, requests_of, starts_of
from ddtree_ops.sweep.records import JOURNAL, Attempt, Measured, cells, opened, read
from ddtree_ops.sweep.strategy import outstanding, remaining_s, whole_grid
from ddtree_ops.sweep.tune import Choice, choose, halving, loads_for, objective, profile_text

from .made import B8K4, B16K4, made_run, repeat

TREES = parse_shapes([], (8, 16, 24, 32, 48), (4, 8))
LOADS = [Load(1, "p", 64, 8, 3), Load(8, "p", 64, 24, 3)]


def measured(cell: Cell, speed: float) -> Measured:
    import random

    one = repeat(random.Random(1), cell.shape, speed, cell.load.concurrency, 4.0, [0.0, 0.1], "t")
    return Measured(t=0.0, cell=cell, status="ok", repeats=[one] * 3, wall_s=10.0, txn=f"{cell.shape.name}{cell.start}")


def test_pairs_and_grids_name_trees() -> None:
    assert parse_shapes(["16/4", "8/4", "8/4"], [], []) == [B8K4, B16K4]
    assert parse_shapes([], [8, 16], [4]) == [B8K4, B16K4]


@pytest.mark.parametrize(
    ("pairs", "budgets", "topks"), [(["8"], [], []), (["0/4"], [], []), ([], [8], []), (["8/4"], [8], [4])]
)
def test_half_a_tree_is_refused(pairs: list[str], budgets: list[int], topks: list[int]) -> None:
    with pytest.raises(UsageError):
        parse_shapes(pairs, budgets, topks)


def test_every_cell_comes_once_and_the_reference_again_at_the_end() -> None:
    shapes = [AR, CHAIN, *TREES]
    starts = starts_of(shapes, LOADS, 1)
    firsts = [cell for start in starts if start.number == 1 for cell in start.cells]
    assert len(firsts) == len(set(firsts)) == len(shapes) * len(LOADS)
    assert starts[0].shape == starts[-1].shape == AR
    assert [start.number for start in starts if start.shape == AR] == [1, 2, 3, 4]
    assert starts == starts_of(shapes, LOADS, 1) != starts_of(shapes, LOADS, 2)


def test_there_are_more_requests_than_lock_step_needs() -> None:
    assert (requests_of(1, 32), requests_of(8, 128), requests_of(128, 128)) == (32, 128, 384)


def test_a_sweep_that_is_done_wants_two_starts_of_what_is_compared() -> None:
    shapes = [AR, CHAIN, B8K4, B16K4]
    strategy, done = whole_grid(shapes, LOADS, 1), {}
    speeds = {AR: 100.0, CHAIN: 130.0, B8K4: 150.0, B16K4: 140.0}
    for _ in range(100):
        left = outstanding(strategy(done), done)
        if not left:
            break
        for cell in left[0].cells[:1]:  # one cell at a time, as if killed after each
            done[cell] = measured(cell, speeds[cell.shape])
    counts = {shape: sum(c.shape == shape and c.load == LOADS[1] for c in done) for shape in shapes}
    assert counts == {AR: 1, CHAIN: 2, B8K4: 2, B16K4: 2}
    assert remaining_s(strategy(done), done, [5.0]) == 0


def test_no_time_is_told_before_anything_was_measured() -> None:
    starts = starts_of([AR, B8K4], LOADS, 1)
    assert remaining_s(starts, {}, []) is None
    first = starts[0].cells[0]
    assert remaining_s(starts, {first: measured(first, 1.0)}, [5.0]) == 3 * 5.0 + 10.0 * 4


def test_the_journal_survives_a_torn_line(tmp_path: Path) -> None:
    records = made_run({(AR, 1): 100.0})
    with opened(tmp_path) as journal:
        for record in records:
            journal.append(record)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:50])
    assert read(path) == records
    with opened(tmp_path) as journal:
        assert path.read_bytes() == whole
        assert len(cells(journal.records)) == 2
        journal.append(Attempt(t=1.0, txn="x", shape=AR, number=3, back_to=None))
    assert len(read(path)) == len(records) + 1


def test_two_sweeps_do_not_write_one_run(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(Locked), opened(tmp_path):
        pass


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"kind": "something"}\n')
    with pytest.raises(UsageError, match=r"records\.jsonl:1"):
        read(tmp_path / JOURNAL)


def simulated(shape: Shape) -> float:
    """Tokens/s at C=8 as on ct200: it falls with the budget, AR in between."""
    return {AR: 100.0, CHAIN: 125.0}.get(shape, 150.0 - 1.1 * abs((shape.budget or 0) - 10) + (shape.topk == 4))


def test_tuning_finds_the_best_and_runs_a_part_of_the_grid() -> None:
    shapes, goal = [AR, CHAIN, *TREES], objective("C=8")
    rungs = loads_for(goal, "p", 64, 128, 3)
    strategy, done = halving(shapes, rungs, 3), {}
    for _ in range(200):
        left = outstanding(strategy(done), done)
        if not left:
            break
        for cell in left[0].cells:
            done[cell] = measured(cell, simulated(cell.shape))
    found = choose(shapes, rungs, done, 5)
    assert found.shape == B8K4
    tried = {cell.shape for cell in done}
    assert Shape("ddtree", 48, 4) not in tried and Shape("ddtree", 48, 8) not in tried
    assert sum(cell.load in rungs[-1] for cell in done) <= 7
    assert "of a grid of 12 shapes x 5 C = 60 cells" in found.ran
    assert found.over_second is not None and found.over_second.starts == (2, 2)


def test_tuning_leaves_out_what_has_no_figures() -> None:
    shapes, rungs = [AR, B8K4], loads_for(objective("latency"), "p", 64, 8, 3)
    strategy, done = halving(shapes, rungs, 1), {}
    for _ in range(50):
        left = outstanding(strategy(done), done)
        if not left:
            break
        for cell in left[0].cells:
            bad = Measured(t=0.0, cell=cell, status="not-exact", reason="FAIL")
            done[cell] = bad if cell.shape == B8K4 else measured(cell, 100.0)
    assert choose(shapes, rungs, done, 5).shape == AR


@pytest.mark.parametrize("text", ["speed", "C=0", "C=x", "8"])
def test_an_objective_is_one_of_three_forms(text: str) -> None:
    with pytest.raises(UsageError):
        objective(text)


def test_the_profile_that_tuning_writes_is_one_that_the_workspace_reads(tmp_path: Path) -> None:
    init_workspace(tmp_path)
    found = Choice(B8K4, None, None, 326.0, 4.0, "7 cells in full")
    for digest in ("0" * 64, "1e" + "5" * 62, "ab" * 32):
        text = profile_text(found, objective("C=8"), "ct200", "sweeps/x/records.jsonl", digest, ["Rule: a\nb"])
        (tmp_path / "inventories" / "profiles" / "tuned.yaml").write_text(text)
        profile = resolve(load_workspace(tmp_path), "ct200", None, "tuned").profile
        assert (profile.algorithm, profile.budget, profile.topk) == ("ddtree", 8, 4)
        assert profile.evidence is not None and profile.evidence.sha256 == digest
        assert "evidence" not in profile_to_json(profile)
