"""A host at a glance, for ``ddtree hosts``: GPUs, the age of the last verdict, what the doctor would say."""

from __future__ import annotations

from ddtree_ops.doctor.check import Case
from ddtree_ops.doctor.checks.cards import IDLE_MIB
from ddtree_ops.doctor.examine import Report, examine
from ddtree_ops.doctor.facts import Cards, host_facts
from ddtree_ops.doctor.run import look
from ddtree_ops.errors import Failed
from ddtree_ops.model import Deployment
from ddtree_ops.remote.transport import Transport


def glance(deployment: Deployment, transport: Transport) -> tuple[dict[str, str], dict[str, float | None]]:
    """``gpus busy``, ``verdict age`` and ``doctor`` of a table's row, and values of `exported.METRICS`.

    Where the collector fails, that is the doctor's word.
    """
    try:
        case = Case(deployment, host_facts(look(deployment, transport)))
    except Failed as error:
        return {"gpus busy": "?", "verdict age": "", "doctor": error.message}, {}
    return row_of(case)


def row_of(case: Case) -> tuple[dict[str, str], dict[str, float | None]]:
    """As `glance`, of facts that are there."""
    proven, now = case.facts.service.unit_proven, case.facts.clock.unix
    at = None if proven is None else proven.at
    report, busy = examine(case), busy_of(case.facts.cards)
    row = {
        "gpus busy": busy,
        "verdict age": "" if at is None or now is None else age(now - at),
        "doctor": said(report),
    }
    restarts = case.facts.service.restarts
    return row, {
        "ddtree_service_restarts_total": None if restarts is None else float(restarts),
        "ddtree_speculation_expected": float(case.profile.algorithm != "none"),
        "ddtree_accept_length_floor": case.profile.min_accept_length,
        "ddtree_verdict_timestamp_seconds": at,
        "ddtree_doctor_errors": float(report.count("error")),
        "ddtree_gpus_busy": float(busy.split()[0]) if busy[0].isdigit() else None,
    }


def busy_of(cards: Cards) -> str:
    """``2 of 8``; "none" where there are no GPUs to tell of, "?" where nobody can tell."""
    if cards.problem is not None:
        return "none" if "not installed" in cards.problem else "?"
    held = {row.gpu for row in cards.processes}
    busy = [g for g in cards.gpus if g.index in held or (g.memory_used_mib or 0) > IDLE_MIB or (g.utilization or 0) > 0]
    return f"{len(busy)} of {len(cards.gpus)}"


def age(seconds: float) -> str:
    """``5 min``, ``3 h``, ``12 d``; a verdict of the future is said to be so."""
    if seconds < -60:
        return "in the future"
    for unit, size in (("d", 86_400), ("h", 3600)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0) / 60:.0f} min"


def said(report: Report) -> str:
    """The ids of errors, else of warnings, else how many checks could not be made, else "ok"."""
    for severity, word in (("error", "errors"), ("warning", "warnings")):
        ids = list(dict.fromkeys(found.id for found in report.findings if found.severity == severity))
        if ids:
            return f"{len(ids)} {word}: {', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''}"
    return f"{len(report.not_made)} not made" if report.not_made else "ok"
