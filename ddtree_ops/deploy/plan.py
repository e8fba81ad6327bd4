"""What a deploy would change. Pure: facts and files in, a plan out; nothing here contacts a host.

A plan becomes a *sealed* plan, the JSON that ``ddtree-host apply`` takes: it names what it expects to find,
and the host refuses it when that is no longer so (design.md, "How a deploy goes").
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from ddtree_ops.deploy.facts import Facts, Model
from ddtree_ops.deploy.fatal import FATAL_LINES
from ddtree_ops.model import Deployment, profile_to_json
from ddtree_ops.units import expectations, render

UNIT_DIR = "/etc/systemd/system"
LEASE_S = 60
SWITCH_FILE = {"systemd": "unit", "process": "process.json"}

Action = Literal["nothing", "deploy", "rollback"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would change on one host's service and why.

    ``reasons`` say why it is not a no-op; ``drift`` lists what somebody else changed on the host, which needs
    ``--adopt`` or ``--overwrite``; ``notes`` are promises and limits worth reading before saying yes.
    ``from_`` is the generation to come back to (None: the service is removed again), ``to`` the one tried. ``adopts``:
    what is installed is not as ddtree left it and is kept as a generation of its own, the one to come back to.
    """

    host: str
    service: str
    action: Action
    from_: int | None
    to: int | None
    release: str | None
    reasons: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    adopts: bool = False
    diff: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expect: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def changes(self) -> bool:
        """True when applying it would write anything on the host."""
        return self.action != "nothing"

    def as_json(self) -> dict[str, Any]:
        """The plan for ``--json``, without the files' full text."""
        return {
            "host": self.host,
            "service": self.service,
            "action": self.action,
            "from": self.from_,
            "to": self.to,
            "release": self.release,
            "reasons": list(self.reasons),
            "drift": list(self.drift),
            "notes": list(self.notes),
            "adopts": self.adopts,
            "diff": self.diff,
        }


def sha256(text: str) -> str:
    """Hex sha256 of the text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def profile_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``["budget 8 -> 16", ...]`` for the profile keys that differ, in the new profile's order."""
    keys = [key for key in {**new, **old} if key not in ("name", "applied_rules")]
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def find_drift(facts: Facts, supervisor: str) -> list[str]:
    """What differs between the host and what ddtree last left there, one line each; empty when nothing does.

    While a deploy has not ended the host is as that deploy left it: nothing can be said then.
    """
    if facts.state.pending is not None:
        return []
    unit, generation = facts.unit, facts.generation
    found = [f"drop-in {path} was added by somebody else" for path in sorted(unit.dropins)]
    if unit.masked:
        found.append(f"{unit.path} is masked")
    if facts.state.confirmed is None or generation is None:
        if unit.sha256 is not None:
            found.insert(0, f"{unit.path} exists and ddtree did not make it")
        return found
    if generation.adopted:
        return [] if not unit.masked else found
    want = generation.files.get(SWITCH_FILE[supervisor])
    if unit.sha256 is None:
        found.append(f"{unit.path} is gone")
    elif unit.sha256 != want:
        found.append(f"{unit.path} was edited on the host")
    if supervisor == "systemd" and unit.sha256 is not None and unit.enabled not in (True, "enabled"):
        found.append(f"the service is {unit.enabled or 'not enabled'}: it would not start at boot")
    for path, identity in (generation.meta.get("models") or {}).items():
        now = facts.models.get(path)
        if now is None:
            continue
        if not now.present:
            found.append(f"the model at {path} is gone")
        elif now.identity != identity:
            found.append(f"the model at {path} is no longer the one that was proven")
    running = facts.server_info
    if facts.active.state == "active" and running is not None:
        for key, value in ((generation.meta.get("health") or {}).get("expect") or {}).items():
            if running.get(key) != value:
                found.append(f"the running server shows {key} = {running.get(key)!r}, deployed was {value!r}")
    return found


def unproven(facts: Facts) -> str | None:
    """Why the last verdict does not bind what runs now; None when it does."""
    verdict, generation, pending = facts.last_verdict, facts.generation, facts.state.pending
    if pending is not None:
        return f"deploy {pending.txn} has not ended: generation {pending.to} may be what serves"
    if generation is None:
        return "nothing was ever proven here"
    if verdict is None:
        return f"generation {generation.n} has no verdict"
    if generation.adopted:
        return "a hand-made unit has no profile to be proven by"
    if not verdict.get("passed"):
        return f"the last verdict is {verdict.get('kind')}"
    binds = verdict.get("binds") or {}
    if binds.get("generation") != generation.n:
        return f"the last verdict is of generation {binds.get('generation')}"
    if binds.get("python") != facts.system.python:
        return f"the interpreter was {binds.get('python')} when it was proven, it is {facts.system.python} now"
    if binds.get("driver") and facts.system.driver and binds["driver"] != facts.system.driver:
        return f"the driver was {binds['driver']} when it was proven, it is {facts.system.driver} now"
    return None


def model_paths(deployment: Deployment) -> list[str]:
    """The model directories on the host whose identity belongs to the generation (not those inside the release)."""
    profile = deployment.profile
    return [path for path in (profile.model, profile.drafter) if path is not None and path.startswith("/")]


def make_plan(
    deployment: Deployment,
    release: str,
    facts: Facts,
    *,
    adopt: bool = False,
    overwrite: bool = False,
    author: Mapping[str, Any] | None = None,
) -> Plan:
    """Compare what should run with what does.

    ``release`` is the id the profile's pins and patches hash to; ``author`` (who, client, workspace_commit,
    created) goes into the generation's metadata and never decides anything.
    """
    supervisor = deployment.host.supervisor
    current = facts.generation
    drift = find_drift(facts, supervisor)
    reasons: list[str] = []
    new_profile: dict[str, Any] = json.loads(profile_to_json(deployment.profile))
    if current is None:
        reasons.append("nothing is deployed yet")
    elif current.adopted:
        reasons.append(f"a hand-made unit runs (generation {current.n})")
    else:
        if current.meta.get("release") != release:
            reasons.append(f"release {current.meta.get('release')} -> {release}")
        reasons += profile_changes(current.meta.get("profile") or {}, new_profile)
        same = render(deployment, release, current.n).files
        if not reasons and any(sha256(text) != current.files.get(name) for name, text in same.items()):
            reasons.append("the rendered files differ (inventory or templates changed)")
        if facts.active.state != "active":
            reasons.append(f"the service is {facts.active.state}")
        if not reasons and not drift and (why := unproven(facts)):
            reasons.append(f"UNPROVEN: {why}")
    reasons += [f"drift: {line}" for line in drift if overwrite or adopt]

    if not reasons and not drift:
        return Plan(
            host=deployment.host.name,
            service=deployment.service_name,
            action="nothing",
            from_=facts.state.confirmed,
            to=facts.state.confirmed,
            release=release,
            expect=expected(facts),
        )

    adopts = adopt and bool(drift)
    number = facts.next_generation or 1
    if adopts and facts.adopt_generation == number:
        number += 1  # the host gives that one to what it keeps
    files = dict(render(deployment, release, number).files)
    profile = deployment.profile
    meta = {
        "n": number,
        "release": release,
        "engine": profile.engine,
        "profile": new_profile,
        "models": {path: facts.models[path].identity for path in model_paths(deployment) if path in facts.models},
        "health": health(deployment),
        **(author or {}),
    }
    switch = SWITCH_FILE[supervisor]
    return Plan(
        host=deployment.host.name,
        service=deployment.service_name,
        action="deploy",
        from_=facts.adopt_generation if adopts else facts.state.confirmed,
        to=number,
        adopts=adopts,
        release=release,
        reasons=tuple(reasons),
        drift=tuple(() if overwrite or adopt else drift),
        notes=tuple(_notes(deployment, facts, lost=overwrite and not adopt)),
        diff=unified_diff(facts.unit.text or "", files[switch], facts.unit.path or switch),
        files=files,
        meta=meta,
        expect=expected(facts),
    )


def expected(facts: Facts) -> dict[str, Any]:
    """What a sealed plan names of the host as it was seen; the host refuses the plan when it is no longer so."""
    return {
        "state": {"confirmed": facts.state.confirmed, "pending": None},
        "unit_sha256": facts.unit.sha256,
        "dropins": dict(facts.unit.dropins),
        "next_generation": facts.next_generation,
    }


def health(deployment: Deployment) -> dict[str, Any]:
    """The host's own health check: port, limit in seconds, resolved arguments to find, log lines that end the wait."""
    profile = deployment.profile
    return {
        "port": deployment.service.port,
        "timeout_s": profile.load_timeout_s,
        "expect": expectations(profile),
        "fatal": list(FATAL_LINES),
    }


def missing_models(deployment: Deployment, facts: Facts) -> list[str]:
    """Model directories the profile names and the host does not have: a deploy never downloads weights."""
    return [path for path in model_paths(deployment) if not facts.models.get(path, Model()).present]


def unified_diff(old: str, new: str, name: str) -> str:
    """A unified diff of two texts, empty when equal."""
    return "".join(
        difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            fromfile=f"{name} (host)",
            tofile=f"{name} (rendered)",
        )
    )


def seal(
    plan: Plan, deployment: Deployment, *, txn: str, author: Mapping[str, Any], adopt: bool, overwrite: bool
) -> dict[str, Any]:
    """The JSON document that ``ddtree-host apply`` takes for this plan."""
    profile = deployment.profile
    new = plan.action == "deploy"
    return {
        "format": 1,
        "txn": txn,
        "who": author.get("who", ""),
        "client": author.get("client", ""),
        "workspace_commit": author.get("workspace_commit"),
        "action": plan.action,
        "root": deployment.host.root,
        "service": plan.service,
        "supervisor": deployment.host.supervisor,
        "unit_dir": UNIT_DIR,
        "expect": dict(plan.expect),
        "adopt": adopt,
        "overwrite": overwrite,
        "generation": {"n": plan.to, "files": dict(plan.files), "meta": dict(plan.meta)} if new else None,
        "target": plan.to,
        "release": plan.release,
        "health": dict(plan.meta["health"]),
        "stop_timeout_s": profile.stop_timeout_s,
        "gate_timeout_s": profile.exactness.time_limit_s + LEASE_S,
        "lease_s": LEASE_S,
    }


def _notes(deployment: Deployment, facts: Facts, *, lost: bool) -> list[str]:
    notes = []
    if lost and facts.state.confirmed is None and facts.unit.sha256 is not None:
        notes.append("the unit that is there is replaced: if this deploy fails, nothing runs (--adopt would keep it)")
    if deployment.host.supervisor == "process":
        notes.append("plain process, no systemd: it does not come back after a reboot")
    if facts.active.state == "active":
        notes.append("the running server stops before the new one starts; the downtime is measured and printed")
    notes.append("serves unproven on its port from health until the gate's verdict")
    notes += [f"rule {rule}" for rule in deployment.profile.applied_rules]
    return notes
