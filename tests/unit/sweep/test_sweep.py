"""Given a host of plain processes with the reference engine, a sweep measures what is exact and puts all back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_ops.errors import Interrupted
from ddtree_ops.model import Workspace, resolve
from ddtree_ops.sweep.grid import AR, Cell, Load, Shape
from ddtree_ops.sweep.records import Attempt, Ended, Journal, Started, cells, opened
from ddtree_ops.sweep.runner import Outcome, Progress, Sweep, run
from ddtree_ops.sweep.strategy import whole_grid
from ddtree_ops.sweep.workload import HELD_OUT, prompt_set

from .place import Quiet, confirmed, processes, workspace_in

# Some ten seconds a start on two idle cores, a minute where others work on them.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
B4K2 = Shape("ddtree", 4, 2)
LOADS = [Load(1, HELD_OUT, 12, 2, 3), Load(2, HELD_OUT, 12, 6, 3)]


def sweep_of(workspace: Workspace, shapes: list[Shape], loads: list[Load], limit_s: float | None = None) -> Sweep:
    sets = {HELD_OUT: prompt_set(HELD_OUT, resolve(workspace, "local").profile)}
    strategy = whole_grid(shapes, loads, 1)
    return Sweep(
        workspace, "local", None, shapes, loads, sets, strategy, 1, "ddtree sweep", 30, limit_s, rehearse=False
    )


def nobody(_: Progress) -> None:
    """Nothing is watched."""


def went(workspace: Workspace, sweep: Sweep) -> tuple[Outcome, Journal]:
    with opened(workspace.path / "sweeps" / "x") as journal:
        return run(sweep, journal, Quiet(), nobody), journal


@pytest.fixture
def healthy(tmp_path: Path) -> Iterator[Workspace]:
    with workspace_in(tmp_path) as workspace:
        yield workspace


def test_a_sweep_stops_at_its_time_goes_on_and_leaves_nothing(healthy: Workspace) -> None:
    shapes = [AR, B4K2]
    first, journal = went(healthy, sweep_of(healthy, shapes, LOADS[:1], limit_s=0.0))
    assert first.done == {} and first.left == 3 and journal.of(Attempt) == []
    with opened(healthy.path / "sweeps" / "x") as journal:
        made = sweep_of(healthy, shapes, LOADS[:1])
        outcome = run(made, journal, Quiet(), nobody)
    assert outcome.left == 0 and {record.status for record in outcome.done.values()} == {"ok"}
    names = {(cell.shape.name, cell.start) for cell in outcome.done}
    assert names == {("ar", 1), ("ar", 2), ("b4k2", 1), ("b4k2", 2)}
    assert len(journal.of(Attempt)) == len(journal.of(Started)) == len(journal.of(Ended)) == 4
    assert all(start.passed and start.verdict["kind"] == "EXACT" for start in journal.of(Started))
    outputs = {repeat.outputs for record in outcome.done.values() for repeat in record.repeats}
    assert len(outputs) == 1  # fp32: the tree's tokens are AR's, in every repeat of every start
    tree = outcome.done[Cell(B4K2, LOADS[0], 1)]
    assert len(tree.repeats) == 3 and all(repeat.tokens == 24 for repeat in tree.repeats)
    assert 1 < (tree.repeats[0].accept_length or 0) <= 5
    assert all(repeat.cached_tokens == 0 for record in outcome.done.values() for repeat in record.repeats)
    assert outcome.done[Cell(AR, LOADS[0], 1)].repeats[0].accept_length is None
    assert confirmed(healthy) is None and processes(Path(healthy.hosts["local"].root)) == []
    size = journal.path.stat().st_size
    again, _ = went(healthy, made)
    assert again.left == 0 and journal.path.stat().st_size == size  # nothing to do writes nothing


def test_ctrl_c_puts_the_host_back_and_what_was_measured_stays(healthy: Workspace) -> None:
    def watch(progress: Progress) -> None:
        if progress.running is not None and progress.running.load == LOADS[1]:
            signal.raise_signal(signal.SIGINT)

    order = sweep_of(healthy, [AR], LOADS)
    first = order.strategy({})[0].cells
    with opened(healthy.path / "sweeps" / "x") as journal, pytest.raises(Interrupted, match="without the service"):
        run(order, journal, Quiet(), watch)
    assert set(cells(journal.records)) == set(first[: first.index(Cell(AR, LOADS[1], 1))])
    assert confirmed(healthy) is None and processes(Path(healthy.hosts["local"].root)) == []


def kill_service(workspace: Workspace, how: signal.Signals) -> None:
    """The engine's own process gets a signal a moment after the cell began."""

    def later() -> None:
        time.sleep(0.3)
        root = workspace.hosts["local"].root
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ProcessLookupError):
                told = (path / "cmdline").read_bytes()
                if path.name.isdigit() and b"ddtree_ops.engine" in told and root.encode() in told:
                    os.kill(int(path.name), how)

    threading.Thread(target=later, daemon=True).start()


def test_a_server_that_dies_or_hangs_costs_its_cell_and_no_more(healthy: Workspace) -> None:
    long = [Load(value, HELD_OUT, 48, 24, 3) for value in (1, 2)]
    made = sweep_of(healthy, [AR], [*long, LOADS[0]])
    signals = {long[0]: signal.SIGKILL, long[1]: signal.SIGSTOP}

    def watch(progress: Progress) -> None:
        if progress.running is not None and (how := signals.pop(progress.running.load, None)) is not None:
            kill_service(healthy, how)

    with opened(healthy.path / "sweeps" / "x") as journal:
        sweep = Sweep(**{**vars(made), "pass_limit_s": 6})
        outcome = run(sweep, journal, Quiet(), watch)
    status = {cell.load: record.status for cell, record in outcome.done.items() if cell.start == 1}
    assert status == {long[0]: "crash", long[1]: "hang", LOADS[0]: "ok"}
    assert all(not record.repeats for record in outcome.done.values() if record.status != "ok")
    assert {end.event for end in journal.of(Ended)} == {"recovered"}
    assert confirmed(healthy) is None and processes(Path(healthy.hosts["local"].root)) == []


def test_what_is_not_exact_has_no_throughput(tmp_path: Path) -> None:
    fault = ["--fault", "mask-rows-by-block-size"]
    with workspace_in(tmp_path, extra_args=fault, exactness={"max_new_tokens": 24, "concurrency": [1, 4]}) as workspace:
        outcome, journal = went(workspace, sweep_of(workspace, [Shape("ddtree", 16, 4)], LOADS))
        assert {record.status for record in outcome.done.values()} == {"not-exact"}
        assert all(record.reason.startswith("FAIL") and not record.repeats for record in outcome.done.values())
        (start,) = journal.of(Started)
        assert not start.passed and len(outcome.done) == 2
        # AR with that argument does not even start: the engine refuses it
        with opened(tmp_path / "sweeps" / "y") as other:
            refused = run(sweep_of(workspace, [AR], LOADS[:1]), other, Quiet(), nobody)
        (record,) = refused.done.values()
        assert record.status == "start-failed" and confirmed(workspace) is None
