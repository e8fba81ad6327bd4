"""Given the journal of an undisturbed sweep, the moments at which benchmarks.sweep_kills kills lie all over it."""

from __future__ import annotations

import itertools
import random

from benchmarks.sweep_kills import BEGIN, moments, part_now, timeline
from ddtree_ops.sweep.grid import AR, Cell
from ddtree_ops.sweep.records import Attempt, Ended, Measured, Record, cells

from .made import B8K4, load, made_run

STARTED_S = 40.0


def journal() -> list[Record]:
    """A run of AR and 8/4 at two C, each started twice, with an attempt STARTED_S before each verdict."""
    found: list[Record] = []
    for record in made_run({(shape, c): 100.0 for shape in (AR, B8K4) for c in (1, 8)}):
        if type(record).__name__ == "Started":
            shape, number = record.shape, record.number  # type: ignore[union-attr]
            found.append(Attempt(t=record.t - STARTED_S, txn="x", shape=shape, number=number, back_to=1))
        found.append(record)
    return found


def test_the_parts_are_the_starts_the_cells_and_the_ways_back() -> None:
    records = journal()
    parts = timeline(records, records[-1].t + 7)
    starts = [(AR, 1), (B8K4, 1), (AR, 2), (B8K4, 2)]
    expected = [BEGIN]
    for shape, number in starts:
        name = f"{shape.name}#{number}"
        expected += [f"start {name}", *(Cell(shape, load(c), number).name for c in (1, 8)), f"way back {name}"]
    assert [part.name for part in parts] == [*expected, "end"]
    assert {part.seconds for part in parts if part.is_cell} == {60.0} and parts[-1].seconds == 7
    assert sum(part.is_cell for part in parts) == len(cells(records))


def test_a_process_that_goes_on_is_where_its_own_records_say() -> None:
    records = journal()
    order = list(cells(records))
    cut = next(i for i, record in enumerate(records) if isinstance(record, Measured)) + 1
    assert part_now(order, records[:cut], 0) == order[1].name
    assert part_now(order, records[:cut], cut) == BEGIN
    again = [*records[:cut], Attempt(t=0.0, txn="y", shape=AR, number=1, back_to=1)]
    assert part_now(order, again, cut) == "start ar#1"
    started = next(record for record in records if type(record).__name__ == "Started")
    assert part_now(order, [*again, started], cut) == order[1].name
    end = next(record for record in records if isinstance(record, Ended))
    assert part_now(order, [*records[: cut + 1], end], 0) == "start b8k4#1"
    assert part_now(order, records, 0) == "end"


def test_three_of_four_moments_lie_in_cells_and_all_over_the_span() -> None:
    records = journal()
    parts = timeline(records, records[-1].t + 1)
    for seed in range(20):
        found = moments(parts, 20, random.Random(seed))
        assert len(found) == 20 and found == sorted(found)
        assert all(0 <= moment.after_s <= parts[moment.part].seconds for moment in found)
        inside = [moment for moment in found if parts[moment.part].is_cell]
        assert len(inside) == 15
        # eight cells of equal length, fifteen strata: no cell is left out, none gets more than three
        hits = [len(list(group)) for _, group in itertools.groupby(inside, key=lambda moment: moment.part)]
        assert len(hits) == 8 and max(hits) <= 3
    assert moments(parts, 20, random.Random(1)) != moments(parts, 20, random.Random(2))
