"""What is wrong or moved in a run, whatever its speeds: acceptance, tokens, the reference cell. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ddtree_ops.sweep.grid import AR, Load, Shape
from ddtree_ops.sweep.records import Ended, Measured, Record
from ddtree_ops.sweep.tables import Group, Result, header

#: A cell's accept length may differ from another C's by this share before it is a finding.
ACCEPT_BOUND = 0.01


def accept_findings(group: Group) -> list[str]:
    """Shapes whose greedy accept length changes with C: prompts that both have are compared, nothing else.

    And those whose accept length is not of all requests.
    """
    found = []
    for shape in group.shapes:
        own = [r for load in group.loads if (r := group.get(shape, load)) is not None]
        for result in own:
            speculated = [row for repeat in result.repeats for row in repeat.rows if row.steps is not None]
            if left_out := sum(row.steps_until_eos is None for row in speculated):
                found.append(
                    f"{shape.name} at C={result.load.concurrency}: the accept length leaves out {left_out} of "
                    f"{len(speculated)} requests, of which it is not known how many steps came before their EOS"
                )
        results = [result for result in own if result.accept_length]
        for one, other in zip(results[:1] * len(results), results[1:], strict=False):
            common = _prompts(one) & _prompts(other)
            a, b = _accept(one, common), _accept(other, common)
            if a and b and abs(a / b - 1) > ACCEPT_BOUND:
                found.append(
                    f"{shape.name}: accept length {a:.3f} at C={one.load.concurrency} and {b:.3f} at "
                    f"C={other.load.concurrency}, {len(common)} prompts alike: greedy decoding must not depend on C"
                )
    return found


def _prompts(result: Result) -> set[int]:
    return {row.prompt for repeat in result.repeats for row in repeat.rows}


def _accept(result: Result, prompts: set[int]) -> float | None:
    rows = [r for repeat in result.repeats for r in repeat.rows if r.prompt in prompts and r.steps_until_eos]
    steps = sum(row.steps_until_eos or 0 for row in rows)
    return sum(row.until_eos - 1 for row in rows) / steps if steps else None


def output_findings(group: Group) -> list[str]:
    """In fp32, shapes whose tokens are not AR's under the same load, and repeats that differ among themselves."""
    found = []
    if group.identity.get("dtype") != "float32":
        return []
    for load in group.loads:
        hashes = {
            shape: {repeat.outputs for repeat in result.repeats}
            for shape in group.shapes
            if (result := group.get(shape, load)) is not None
        }
        for shape, own in hashes.items():
            if len(own) > 1:
                found.append(f"{shape.name} at C={load.concurrency}: its repeats gave different tokens (fp32, greedy)")
            elif AR in hashes and len(hashes[AR]) == 1 and own != hashes[AR]:
                found.append(f"{shape.name} at C={load.concurrency}: its tokens are not AR's (fp32, greedy)")
    return found


class Drift(NamedTuple):
    """The reference cell over the run: (hours since the run began, tokens/s) of each start; the largest change."""

    shape: Shape
    load: Load | None
    points: list[tuple[float, float]]
    change: float
    bound: float

    @property
    def exceeded(self) -> bool:
        """Beyond the stated bound."""
        return abs(self.change) > self.bound


def drift(records: Sequence[Record]) -> Drift:
    """How the reference cell changed from the run's first start to the one that is furthest from it."""
    run = header(records)
    own = [r for r in records if isinstance(r, Measured) and r.status == "ok" and r.cell.shape == run.reference]
    counts: dict[Load, list[Measured]] = {}
    for record in own:
        counts.setdefault(record.cell.load, []).append(record)
    if not counts:
        return Drift(run.reference, None, [], 0.0, run.drift_bound)
    load, chosen = max(counts.items(), key=lambda item: len(item[1]))
    points = [((r.t - run.t) / 3600, statistics.median(x.throughput for x in r.repeats)) for r in chosen]
    change = max((value / points[0][1] - 1 for _, value in points), key=abs)
    return Drift(run.reference, load, points, change, run.drift_bound)


def downtimes(records: Sequence[Record]) -> list[float]:
    """Of every start that took the place of a running service, in seconds."""
    return [record.downtime_s for record in records if isinstance(record, Ended) and record.downtime_s is not None]
