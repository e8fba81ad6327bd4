"""``make gate-report``: faults and healthy engines through the gate, and what came of it.

Ends with ``caught N of M faults; K false alarms in R healthy runs; T s a run``; exit 1 unless N = M and K = 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ddtree_ops.deploy.gate import tree_of
from ddtree_ops.engine.faults import Fault
from ddtree_ops.exactness.golden import Golden
from tests.detector.cases import AR, ELSEWHERE, HARMLESS, HEALTHY, TREE, Shape
from tests.detector.report import Outcome, closing, outcome, render
from tests.detector.run import Case, engine, profile, record_counts, record_tokens, run

COUNTED = (Shape(8, 4), TREE)
"""Where healthy runs are held against verify counts; each costs a run that records them."""
GREEDY = ("self-score", "golden")
QUICK_FAULTS = (
    Fault.MASK_ROWS_BY_BLOCK_SIZE,
    Fault.BONUS_KV_KEPT,
    Fault.EXTRA_KEY_IGNORED,
    Fault.PENALTIES_FROZEN,
)
SAMPLED_ONLY = (Fault.PENALTIES_FROZEN,)
"""Those of them that nothing greedy shows."""


@dataclass(frozen=True)
class Job:
    """Runs that share one engine."""

    section: str
    cases: tuple[Case, ...]


def methods(shape: Shape, dtype: str) -> tuple[str, ...]:
    """All that a golden and seeds allow there."""
    sampled = ("same-seed", "distribution") if dtype == "float32" else ("distribution",)
    return (*GREEDY, *sampled)


def full() -> Iterator[Job]:
    """Every fault by every method, where it is harmless, in bfloat16, at other shapes; 200 healthy runs."""
    every = methods(TREE, "float32")
    for fault in Fault:
        yield Job("faults", (Case(TREE, "float32", fault, every),))
    for fault in Fault:
        yield Job("replay", (Case(TREE, "float32", fault, ("replay",)),))
    for fault, shape in ELSEWHERE:
        yield Job("elsewhere", (Case(shape, "float32", fault, every),))
    for fault, shape, _ in HARMLESS:
        yield Job("harmless", (Case(shape, "float32", fault, every),))
    for fault in Fault:
        yield Job("bfloat16", (Case(TREE, "bfloat16", fault, methods(TREE, "bfloat16")),))
    for shape in HEALTHY:
        for dtype in ("float32", "bfloat16"):
            for batches in (range(1, 6), range(6, 11)):
                # Every method costs as much again above temperature 0, so two runs in five have those.
                chosen = {b: methods(shape, dtype) if b % 5 < 2 else GREEDY for b in batches}
                yield Job("healthy", tuple(Case(shape, dtype, None, chosen[b], b) for b in batches))


def quick() -> Iterator[Job]:
    """What `make test` has time for: a fault by the methods that can show it, one healthy run by all, one by a few."""
    for fault in QUICK_FAULTS:
        every = methods(TREE, "float32")
        yield Job("faults", (Case(TREE, "float32", fault, every if fault in SAMPLED_ONLY else GREEDY, 1),))
    yield Job("healthy", (Case(TREE, "float32", None, methods(TREE, "float32"), 1),))
    yield Job("healthy", (Case(AR, "bfloat16", None, GREEDY, 1),))


def only(job: Job, pattern: str) -> Job:
    """The job's cases that the pattern finds, as ``section: fault at shape dtype methods batch``."""
    return Job(job.section, tuple(case for case in job.cases if re.search(pattern, f"{job.section}: {case}")))


def goldens(pool: Executor, jobs: Sequence[Job]) -> dict[tuple[str, int], Golden]:
    """Every golden that a job compares with, by dtype and batch, with the verify counts of all shapes in float32."""
    cases = [case for job in jobs for case in job.cases if "golden" in case.methods]
    needed = sorted({(case.dtype, case.batch) for case in cases})
    found = dict(zip(needed, pool.map(record_tokens, *zip(*needed, strict=True)), strict=True))
    drafting = [case for case in cases if case.dtype == "float32" and case.shape.drafts]
    shapes = {(case.shape, case.batch) for case in drafting if case.batch == 0 or case.shape in COUNTED}
    trees = sorted(shapes, key=str)
    for (shape, batch), counts in zip(trees, pool.map(record_counts, *zip(*trees, strict=True)), strict=True):
        golden, tree = found["float32", batch], tree_of(profile(shape, "float32"))
        assert tree is not None
        known = {**golden.verify_counts, tree.shape: counts}
        found["float32", batch] = msgspec.structs.replace(golden, verify_counts=known)
    return found


def perform(job: Job, known: Sequence[Golden | None]) -> list[Outcome]:
    """A job's runs, one after the other."""
    found = []
    first = job.cases[0]
    with engine(first.shape, first.dtype, first.fault) as url:
        for case, golden in zip(job.cases, known, strict=True):
            verdict = run(case, url, golden)
            found.append(outcome(job.section, case.fault or "", str(case.shape), case.batch, verdict))
            print(f"{verdict.kind:13} {verdict.seconds:6.1f} s  {case}", flush=True)
            if job.section in ("healthy", "harmless") and not verdict.passed():
                print("\n".join(verdict.lines()), flush=True)
    return found


def keep(outcomes: Sequence[Outcome], folder: Path | None) -> None:
    """The rows so far, so that a run that is cut short leaves them."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in outcomes))


def main() -> int:
    """Runs, prints and, with ``--out``, keeps the report and its rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.detector", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few faults and healthy runs")
    parser.add_argument("--only", default="", help="cases that this regular expression finds in their names")
    parser.add_argument("--rows", type=Path, help="rows of an earlier run: what is run again replaces its own there")
    parser.add_argument("--out", type=Path, help="a folder for report.md and rows.jsonl")
    parser.add_argument("--at-once", type=int, default=2, help="engines at a time (each has one thread)")
    given = parser.parse_args()
    earlier = given.rows.read_bytes().splitlines() if given.rows is not None else []
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in earlier]
    jobs = [only(job, given.only) for job in (quick() if given.quick else full())]
    jobs = [job for job in jobs if job.cases]
    if jobs and not (given.rows and not given.only):
        with ProcessPoolExecutor(given.at_once) as pool:
            known = goldens(pool, jobs)
            handed = [[known.get((case.dtype, case.batch)) for case in job.cases] for job in jobs]
            for found in pool.map(perform, jobs, handed):
                made = {one.name for one in found}
                outcomes = [one for one in outcomes if one.name not in made] + found
                keep(outcomes, given.out)
    text = render(outcomes)
    line, good = closing(outcomes)
    if given.out is not None:
        keep(outcomes, given.out)
        (given.out / "report.md").write_text(f"{text}\n{line}\n")
    print(f"{text}\n{line}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
