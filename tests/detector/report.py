"""What the runs say together. Pure: outcomes in, Markdown and the closing line out."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version

import msgspec

from ddtree_ops.engine.faults import Fault
from ddtree_ops.exactness import Kind, Verdict
from ddtree_ops.exactness.judge import OUTLIERS, outlier_limit
from tests.detector.cases import FLOAT32_ONLY, HARMLESS, TREE

COLUMNS = (
    "self-score", "verify-logprob", "second-turn", "concurrency", "replay", "golden", "same-seed", "distribution",
    "stop", "structure",
)  # fmt: skip
STRUCTURE = "structure"
_CODES = {
    "verify-count": "golden",
    "distribution": "distribution",
    "outside-support": "distribution",
    "stop-inside": "stop",
}
"""Reasons that belong to a method; every other failing reason (executed nodes, lengths, namespaces) is structure."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``section``: faults, elsewhere, bfloat16, harmless, replay or healthy. ``caught_by``: of COLUMNS.

    ``gap``: the largest seen by the methods that know one, nat; ``rate``: near-ties a judged token, the largest of any
    method and load; ``beyond``: likewise, of tokens beyond epsilon, and ``beyond_tokens``: how many those are.
    """

    section: str
    fault: str
    shape: str
    dtype: str
    batch: int
    kind: str
    caught_by: list[str]
    codes: list[str]
    epsilon: float
    gap: float | None
    rate: float
    beyond: float
    beyond_tokens: int = 0
    seconds: float
    generated: int
    prefilled: int
    methods: list[str] = []

    @property
    def name(self) -> tuple[str, str, str, str, int]:
        """What was run; one row each."""
        return self.section, self.fault, self.shape, self.dtype, self.batch


def outcome(section: str, fault: str, shape: str, batch: int, verdict: Verdict) -> Outcome:
    """What one verdict adds to the report."""
    judged = [one for one in verdict.methods if one.judged]
    caught = {one.method for one in judged if one.beyond}
    for reason in verdict.reasons:
        if reason.effect == "fail":
            # A rate belongs to the method that its message begins with.
            of_rate = reason.message.partition(":")[0] if reason.code == "near-tie-rate" else STRUCTURE
            caught.add(_CODES.get(reason.code, of_rate))
    return Outcome(
        section=section,
        fault=fault,
        shape=shape,
        dtype=verdict.dtype,
        batch=batch,
        kind=verdict.kind,
        caught_by=[column for column in COLUMNS if column in caught],
        codes=sorted({reason.code for reason in verdict.reasons if reason.effect != "note"}),
        epsilon=verdict.epsilon,
        gap=max((one.largest_gap for one in judged if one.largest_gap is not None), default=None),
        rate=max((one.near_ties / one.judged for one in judged), default=0.0),
        beyond=max((one.beyond / one.judged for one in judged), default=0.0),
        beyond_tokens=max((one.beyond for one in judged), default=0),
        seconds=verdict.seconds,
        generated=verdict.counts.generated,
        prefilled=verdict.counts.prefilled,
        methods=list(dict.fromkeys(one.method for one in judged)),
    )


def closing(outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """The last line, and whether it is a good one: every fault FAIL wherever it is planted and can be seen, no healthy
    run without a pass, and none where the fault is harmless.
    """
    by_fault: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.section in ("faults", "elsewhere") or (one.section == "bfloat16" and one.fault not in FLOAT32_ONLY):
            by_fault.setdefault(one.fault, []).append(one)
    caught = sum(all(one.kind == Kind.FAIL for one in found) for found in by_fault.values())
    healthy = [one for one in outcomes if one.section in ("healthy", "harmless")]
    alarms = sum(one.kind == Kind.FAIL for one in healthy)
    passes = all(one.kind in (Kind.EXACT, Kind.NEAR_TIE) for one in healthy)
    seconds = statistics.median(one.seconds for one in healthy)
    line = (
        f"caught {caught} of {len(by_fault)} faults; {alarms} false alarms in {len(healthy)} healthy runs; "
        f"{seconds:.1f} s a run"
    )
    return line, caught == len(by_fault) and passes


def render(outcomes: Sequence[Outcome]) -> str:
    """The tables in Markdown."""
    return "\n".join(
        [
            "# The gate as a detector",
            "",
            "Made by `make gate-report`: the reference engine with the shipped pair on a CPU "
            f"(Python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores).",
            "",
            *_faults(outcomes),
            *_small("elsewhere", "The same faults at other shapes (float32)", outcomes),
            *_harmless(outcomes),
            *_bfloat16(outcomes),
            *_margins(outcomes),
            *_healthy(outcomes),
        ]
    )


def _faults(outcomes: Sequence[Outcome]) -> list[str]:
    replayed = {one.fault: one for one in outcomes if one.section == "replay"}
    lines = [
        f"## Faults at {TREE}, float32",
        "",
        "A method's mark: it alone would have said FAIL. Replay ran by itself, on fewer tokens.",
        "",
        "| fault | verdict | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + ":-:|" * len(COLUMNS),
    ]
    total = dict.fromkeys(COLUMNS, 0)
    rows = [one for one in outcomes if one.section == "faults"]
    for one in rows:
        by = set(one.caught_by)
        if one.fault in replayed:
            by |= {"replay"} & set(replayed[one.fault].caught_by)
        for column in by:
            total[column] += 1
        lines.append(f"| {one.fault} | {one.kind} | " + " | ".join("x" if c in by else "" for c in COLUMNS) + " |")
    lines.append(f"| **caught of {len(rows)}** | | " + " | ".join(str(total[c]) for c in COLUMNS) + " |")
    return [*lines, ""]


def _small(section: str, title: str, outcomes: Sequence[Outcome]) -> list[str]:
    rows = [one for one in outcomes if one.section == section]
    if not rows:
        return []
    lines = [f"## {title}", "", "| fault | shape | verdict | by |", "|---|---|---|---|"]
    return [*lines, *(f"| {r.fault} | {r.shape} | {r.kind} | {', '.join(r.caught_by)} |" for r in rows), ""]


def _harmless(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [one for one in outcomes if one.section == "harmless"]
    if not rows:
        return []
    reasons = {(fault, str(shape)): why for fault, shape, why in HARMLESS}
    lines = ["## Planted where the shape makes it the same computation", "", "| fault | shape | verdict | why |"]
    lines.append("|---|---|---|---|")
    return [*lines, *(f"| {r.fault} | {r.shape} | {r.kind} | {reasons[Fault(r.fault), r.shape]} |" for r in rows), ""]


def _bfloat16(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [one for one in outcomes if one.section == "bfloat16"]
    if not rows:
        return []
    lines = [f"## Faults at {TREE}, bfloat16", "", "| fault | verdict | by |", "|---|---|---|"]
    for one in rows:
        why = FLOAT32_ONLY.get(Fault(one.fault))
        lines.append(f"| {one.fault} | {one.kind} | {', '.join(one.caught_by) or why or ''} |")
    return [*lines, ""]


def _margins(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "## How far apart faulty and healthy lie",
        "",
        "Gaps in nats; near-ties as a share of the tokens that one method judged at one load, the largest of any run.",
        "Of the faults that a gap shows, the one whose largest gap is smallest.",
        "",
        "| dtype | epsilon | largest healthy gap | largest healthy near-tie rate | smallest fault | over epsilon |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        healthy = [one for one in outcomes if one.section == "healthy" and one.dtype == dtype]
        faulty = [one for one in outcomes if one.section in ("faults", "bfloat16") and one.dtype == dtype]
        gaps = sorted((one.gap, one.fault) for one in faulty if one.gap is not None and one.gap > one.epsilon)
        if not healthy or not gaps:
            continue
        least, fault = gaps[0]
        epsilon = healthy[0].epsilon
        worst = max((one.gap for one in healthy if one.gap is not None), default=0.0)
        rate = max(one.rate for one in healthy)
        lines.append(
            f"| {dtype} | {epsilon:.3g} | {worst:.3g} | {rate:.2%} | {least:.3g} ({fault}) | {least / epsilon:.3g}x |"
        )
    return [*lines, "", *_outlier_margin(outcomes)]


def _outlier_margin(outcomes: Sequence[Outcome]) -> list[str]:
    """What stands between the outliers that 16 bits are forgiven and the faults whose every gap is as small."""
    limit = outlier_limit("bfloat16")
    half = [one for one in outcomes if one.dtype == "bfloat16" and one.gap is not None]
    shown = [one for one in half if one.section == "bfloat16" and (one.gap or 0.0) > one.epsilon]

    def named(found: Sequence[Outcome]) -> str:
        return ", ".join(f"{one.fault} ({one.beyond_tokens}, up to {one.gap:.3g} nat)" for one in found) or "none"

    healthy = sum(one.section == "healthy" and (one.gap or 0.0) > one.epsilon for one in half)
    return [
        f"In bfloat16 up to {OUTLIERS} tokens of a method at one load are forgiven a gap of up to {limit:.3g} nat; "
        f"{healthy} healthy runs needed it. Faults that a gap shows, tokens beyond epsilon at the worst load:",
        "",
        f"* within that gap, so told by their number: {named([one for one in shown if (one.gap or 0.0) <= limit])}",
        f"* no more than {OUTLIERS} tokens, so told by their gap: "
        f"{named([one for one in shown if one.beyond_tokens <= OUTLIERS])}",
        "",
    ]


def _healthy(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [one for one in outcomes if one.section == "healthy"]
    lines = [
        "## Healthy runs",
        "",
        "All by self-score and golden, those under `sampled` by same-seed (float32) and distribution too. Medians.",
        "",
        "| shape | dtype | runs | sampled | EXACT | NEAR-TIE | FAIL | INCONCLUSIVE | s a run | generated | prefilled |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one in rows:
        groups.setdefault((one.shape, one.dtype), []).append(one)
    for (shape, dtype), found in groups.items():
        kinds = [sum(one.kind == kind for one in found) for kind in Kind]
        cost = [
            statistics.median(getattr(one, name) for one in found) for name in ("seconds", "generated", "prefilled")
        ]
        shown = " | ".join(map(str, [sum("distribution" in one.methods for one in found), *kinds]))
        lines.append(f"| {shape} | {dtype} | {len(found)} | {shown} | {cost[0]:.1f} | {cost[1]:.0f} | {cost[2]:.0f} |")
    if rows:
        bound = 1 - 0.05 ** (1 / len(rows))
        lines += ["", f"{len(rows)} runs without a false alarm would bound its rate at {bound:.1%} (95 %), no better."]
    return [*lines, ""]
