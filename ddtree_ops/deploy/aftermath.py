"""What comes after the journal's last word: the evidence kept, what is back proven again, the right error raised."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree_ops.deploy.follow import Entry
from ddtree_ops.deploy.gate import gate_prompts, prove
from ddtree_ops.deploy.plan import Plan
from ddtree_ops.deploy.session import Session, author
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import WORST_FIRST, DdtreeError, Failed, NeedsHand, RolledBack, Unreachable
from ddtree_ops.exactness import Kind, Verdict
from ddtree_ops.model import Deployment, profile_from_json

FOLDER = "evidence"
AGAIN_PROMPTS, AGAIN_TOKENS, AGAIN_LIMIT_S = 4, 32, 120.0
NOTE = "short self-score after a recovery"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a deploy or rollback ended well. ``result`` is ``unchanged`` or ``confirmed``."""

    host: str
    service: str
    result: str
    generation: int | None
    release: str | None
    verdict: Verdict | None = None
    downtime_s: float | None = None
    bytes_sent: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**plain, "verdict": self.verdict.to_json() if self.verdict else None}


@dataclasses.dataclass(frozen=True)
class Attended:
    """One transaction as it was followed: its terminal entry, the gate's verdict if there was one, its journal.

    ``others``: how it ended at a service's further nodes; ``error``: what kept one of several from being known.
    """

    txn: str
    end: Entry
    verdict: Verdict | None
    entries: list[Entry]
    error: DdtreeError | None = None
    others: tuple[Attended, ...] = ()


def conclude(session: Session, plan: Plan, attended: Attended, ui: Ui) -> Outcome:
    """Turn the journal's last word into an outcome or the error with the right exit code.

    After a recovery what runs again is proven by a short self-score. Raises RolledBack, Failed (nothing was changed),
    NeedsHand (the restore failed, or what is back does not answer exactly). Of several nodes all are confirmed, or that
    is raised which is worst; NeedsHand where some are confirmed and some are not.
    """
    if attended.others:
        return _conclude_all(session, plan, [attended, *attended.others], ui)
    return _conclude(session, plan, attended, ui)


def _conclude_all(session: Session, plan: Plan, attended: Sequence[Attended], ui: Ui) -> Outcome:
    nodes = list(zip(session.every, plan.every, attended, strict=True))
    events = [one.end.get("event") for one in attended]
    if set(events) == {"confirmed"}:
        return _conclude(*nodes[0], ui)
    if "confirmed" in events:
        raise _mixed(nodes, ui)
    # rank 0 last: once the others are back it can be asked whether it answers exactly
    found: list[DdtreeError] = []
    for one, there, ended in reversed(nodes):
        if ended.error is not None:
            keep_evidence(one.deployment, ended, ui)
            found.append(ended.error)
            continue
        try:
            _conclude(one, there, ended, ui)
        except DdtreeError as error:
            found.append(error)
    raise min(reversed(found), key=lambda error: _WORST.index(error.exit_code))


#: Of several nodes' exit codes the one that is told: as of several hosts, Ctrl-C before what it led to.
_WORST = (*WORST_FIRST[:1], 130, *WORST_FIRST[1:], 2)


def _mixed(nodes: Sequence[tuple[Session, Plan, Attended]], ui: Ui) -> NeedsHand:
    told, kept = [], []
    for session, plan, ended in nodes:
        event, back = ended.end.get("event"), ended.end.get("generation")
        if event == "confirmed":
            told.append(f"{plan.host} has confirmed generation {plan.to}")
            continue
        kept += keep_evidence(session.deployment, ended, ui)
        where = f"is on generation {back}" if back is not None else "goes back by itself" if ended.error else "has none"
        why = ended.error.message if ended.error else ended.end.get("reason") or "no reason given"
        told.append(f"{plan.host} {where} ({why})")
    which = f"--host {nodes[0][1].host} --service {nodes[0][1].service}"
    return NeedsHand(
        f"{nodes[0][1].service} is mixed: {'; '.join(told)}; its nodes do not meet, so nothing is served",
        hint="\n".join([f"ddtree deploy {which}", f"ddtree status {which}", *kept]),
    )


def _conclude(session: Session, plan: Plan, attended: Attended, ui: Ui) -> Outcome:
    end, verdict = attended.end, attended.verdict
    event, reason = end.get("event"), end.get("reason") or "no reason given"
    if event == "confirmed":
        return Outcome(
            plan.host, plan.service, "confirmed", plan.to, plan.release, verdict, downtime_s=end.get("downtime_s")
        )
    serves_again = event == "recovered" and end.get("proven") is True and end.get("generation") is not None
    again = prove_again(session, int(end["generation"]), ui) if serves_again else None
    kept = keep_evidence(session.deployment, attended, ui, again)
    log = [str(line) for line in (end.get("log") or [])[-10:]]
    if event == "recovered":
        back = f"generation {end.get('generation')}" if end.get("generation") is not None else "nothing deployed"
        told = f"; {again[1]}" if again else ""
        if again and again[0] is Kind.FAIL:
            commands = by_hand(session.deployment)
            raise NeedsHand(f"{plan.host}: {reason}; back on {back}{told}", hint="\n".join([*commands, *kept]))
        hint = [*(verdict.lines() if verdict is not None else ()), *log, *kept]
        raise RolledBack(f"{plan.host}: {reason}; rolled back to {back}{told}", hint="\n".join(hint))
    if event == "unchanged":
        raise Failed(f"{plan.host}: {reason}; nothing was changed", hint="\n".join([*log, *kept]))
    commands = [str(line) for line in end.get("commands") or [f"ddtree recover --host {plan.host}"]]
    raise NeedsHand(f"{plan.host}: the restore failed: {reason}", hint="\n".join([*commands, *kept]))


def by_hand(deployment: Deployment) -> list[str]:
    """What to run when the restored service is healthy and wrong."""
    which = f"--host {deployment.host.name} --service {deployment.service_name}"
    return [f"ddtree verify-exactness {which}", f"ddtree history {which}", f"ddtree stop {which}"]


def prove_again(session: Session, generation: int, ui: Ui) -> tuple[Kind, str] | None:
    """A short self-score of what a recovery started, journaled on the host; None for a hand-made unit.

    A failure is stored on the host as the verdict that counts: it shows UNPROVEN from then on.
    """
    ui.step(f"generation {generation} is back; asking whether it answers exactly")
    try:
        session.transport.run(["true"], timeout=15)
    except Unreachable:
        try:
            session.reconnect()
        except Unreachable as error:
            return Kind.INCONCLUSIVE, f"whether it answers exactly is not known: {error.message}"
    deployment = session.deployment
    try:
        stored = session.agent.call("generation", n=generation)
        if stored["meta"].get("adopted") is not None:
            return None
        profile = profile_from_json(stored["files"]["profile.json"])
        health = stored["meta"]["health"]
        prompts, prompt_set = gate_prompts(profile, deployment.workspace_path)
        verdict = prove(
            session.transport,
            profile,
            port=int(health["port"]),
            expect=health["expect"],
            workspace=deployment.workspace_path,
            overrides={
                "prompts": prompts[:AGAIN_PROMPTS],
                "prompt_set": f"{prompt_set}, the first {AGAIN_PROMPTS}",
                "concurrency": (1,),
                "max_new_tokens": min(AGAIN_TOKENS, profile.exactness.max_new_tokens),
                "time_limit_s": min(AGAIN_LIMIT_S, profile.exactness.time_limit_s),
                "min_accept_length": None,
            },
        )
        failed = verdict.kind is Kind.FAIL
        by = author(deployment.workspace_path)
        told = {**verdict.to_json(), "passed": verdict.passed(profile.exactness.policy)}
        note = "" if failed else NOTE
        session.agent.call("record", n=generation, verdict=told, who=by["who"], client=by["client"], note=note)
    except DdtreeError as error:
        return Kind.INCONCLUSIVE, f"whether it answers exactly is not known: {error.message}"
    said = f"it answers: {verdict.kind} over {verdict.counts.judged} tokens"
    return verdict.kind, "; ".join([said, *(verdict.lines()[1:2] if failed else ())])


def keep_evidence(
    deployment: Deployment, attended: Attended, ui: Ui, again: tuple[Kind, str] | None = None
) -> list[str]:
    """The journal of a transaction that ended badly and its verdict, as a file of the workspace; the line that says so.

    The host has its own copy, with the log, below the generation's ``evidence/``.
    """
    found = {
        "host": deployment.host.name,
        "service": deployment.service_name,
        "txn": attended.txn,
        "end": attended.end,
        "verdict": attended.verdict.to_json() if attended.verdict is not None else None,
        "afterwards": again and {"kind": str(again[0]), "said": again[1]},
        "journal": attended.entries,
    }
    path = deployment.workspace_path / FOLDER / deployment.host.name / f"{attended.txn}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
    except OSError as error:
        ui.warn(f"the evidence is not kept here: {error}")
        return []
    where = [str(entry["where"]) for entry in attended.entries if entry.get("step") == "evidence" and "where" in entry]
    return [f"evidence: {_shown(path)}", *(f"evidence on the host: {line}" for line in where[-1:])]


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
