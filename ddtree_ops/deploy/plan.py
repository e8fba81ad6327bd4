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

from ddtree_ops.deploy.drift import SWITCH_FILE, find_drift, unproven
from ddtree_ops.deploy.facts import Facts, Model
from ddtree_ops.deploy.fatal import FATAL_LINES
from ddtree_ops.model import Deployment, profile_to_json
from ddtree_ops.model.archs import silenced_rules
from ddtree_ops.release import untried_base
from ddtree_ops.units import expectations, render

UNIT_DIR = "/etc/systemd/system"
LEASE_S = 60

Action = Literal["nothing", "deploy", "rollback"]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What of the release the host's store lacks, in bytes before compression; None where it is not built yet."""

    files: int | None
    bytes: int | None


@dataclasses.dataclass(frozen=True)
class Known:
    """What a plan is made with besides the probe.

    ``author`` (who, client, workspace_commit, created) goes into the generation's metadata. ``ancestor``: whether the
    commit that the host's generation came from is in this workspace's history, None where there is no such commit.
    ``transfer``: None when the release is on the host. ``cannot_guard``: why the host cannot keep others off an
    unproven port ("": it can), None where nobody else reaches it anyway. ``old_env``: the environment file there.
    ``evidence``: which sweep the profile stands on, in words. ``why``: another node's reason to change this one too.
    """

    author: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ancestor: bool | None = None
    transfer: Transfer | None = None
    cannot_guard: str | None = None
    old_env: str | None = None
    evidence: str = ""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would change on one host's service and why.

    ``reasons`` say why it is not a no-op; ``drift`` lists what somebody else changed on the host, which needs
    ``--adopt`` or ``--overwrite``; ``behind`` says that what runs came from commits this workspace lacks, which needs
    ``--overwrite``; ``notes`` are promises and limits worth reading before saying yes. ``from_`` is the generation to
    come back to (None: the service is removed again), ``to`` the one tried. ``adopts``: what is installed is not as
    ddtree left it and is kept as a generation of its own, the one to come back to. ``guard``: until confirm the host
    keeps others off the port. ``downtime_s``: the last change's (None: unknown), ``downtime_limit_s`` what it may take.
    ``others``: the plans of a service's further nodes, by rank; ``exposed``: why more than its nodes would reach its
    workers' ports, which is refused.
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
    behind: str | None = None
    adopts: bool = False
    overwrite: bool = False
    guard: bool = False
    transfer: Transfer | None = None
    restarts: str | None = None
    downtime_s: float | None = None
    downtime_limit_s: float | None = None
    others: tuple[Plan, ...] = ()
    exposed: str = ""
    diff: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expect: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def every(self) -> list[Plan]:
        """One plan a node, this one first."""
        return [self, *self.others]

    @property
    def changes(self) -> bool:
        """True when applying it would write anything on the host."""
        return self.action != "nothing"

    def as_json(self) -> dict[str, Any]:
        """The plan for ``--json``, without the files' full text."""
        told = dataclasses.asdict(self)
        for key in ("files", "meta", "expect", "exposed"):
            del told[key]
        told["others"] = [one.as_json() for one in self.others]
        return {"from" if key == "from_" else key: value for key, value in told.items()}


def sha256(text: str) -> str:
    """Hex sha256 of the text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def profile_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``["budget 8 -> 16", ...]`` for the profile keys that differ, in the new profile's order."""
    old, new = _without_meeting_port(old), _without_meeting_port(new)
    keys = [key for key in {**new, **old} if key not in ("name", "applied_rules")]
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _without_meeting_port(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Every deploy of a service over several hosts has another: that is no change that anybody asked for."""
    if profile.get("nodes") is None:
        return dict(profile)
    return {**profile, "nodes": {key: value for key, value in profile["nodes"].items() if key != "port"}}


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
    known: Known | None = None,
) -> Plan:
    """Compare what should run with what does. ``release`` is the id the profile's pins and patches hash to."""
    known = known or Known()
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
        if (
            not reasons
            and not known.why
            and any(sha256(text) != current.files.get(name) for name, text in same.items())
        ):
            reasons.append("the rendered files differ (inventory or templates changed)")
        if facts.active.state != "active":
            reasons.append(f"the service is {facts.active.state}")
        if not reasons and not drift and (why := unproven(facts)):
            reasons.append(f"UNPROVEN: {why}")
    reasons += [known.why] if known.why and not reasons else []
    reasons += [f"drift: {line}" for line in drift if overwrite or adopt]

    if not reasons and not drift:
        return Plan(
            host=deployment.host.name,
            service=deployment.service_name,
            action="nothing",
            from_=facts.state.confirmed,
            to=facts.state.confirmed,
            release=release,
            notes=(*_doubts(deployment), *((known.evidence,) if known.evidence else ())),
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
        **({"nodes": {"rank": profile.nodes.rank, "addresses": profile.nodes.addresses}} if profile.nodes else {}),
        "models": {path: facts.models[path].identity for path in model_paths(deployment) if path in facts.models},
        "health": health(deployment),
        **known.author,
    }
    running = facts.active.state in ("active", "activating", "reloading")
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
        behind=None if overwrite else behind(facts, known),
        overwrite=overwrite,
        guard=known.cannot_guard == "",
        transfer=known.transfer,
        restarts=f"{deployment.service_name} (pid {facts.active.pid})" if running else None,
        downtime_s=(facts.last_downtime_s if running else 0.0),
        downtime_limit_s=float(profile.stop_timeout_s + profile.load_timeout_s) if running else 0.0,
        notes=tuple(_notes(deployment, facts, known, lost=overwrite and not adopt)),
        diff=full_diff(facts, files, supervisor, known.old_env),
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


def behind(facts: Facts, known: Known) -> str | None:
    """That what runs came from a commit which this workspace's history lacks: a deploy would undo another's work."""
    if facts.generation is None or known.ancestor is not False:
        return None
    meta, mine = facts.generation.meta, known.author.get("workspace_commit")
    here = str(mine)[:12] if mine else "no git"
    return (
        f"generation {facts.generation.n} came from workspace commit {str(meta.get('workspace_commit'))[:12]} of "
        f"{meta.get('who') or 'somebody'}, which is not in the history of yours ({here})"
    )


def full_diff(facts: Facts, files: Mapping[str, str], supervisor: str, old_env: str | None) -> str:
    """The unit, its environment file where that changes, and the drop-ins that would be taken away."""
    switch = SWITCH_FILE[supervisor]
    found = unified_diff(facts.unit.text or "", files[switch], facts.unit.path or switch)
    if old_env is not None:
        found += unified_diff(old_env, files["env"], "env")
    for path, text in sorted(facts.unit.dropin_texts.items()):
        found += unified_diff(text, "", path)
    return found


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


def seal(plan: Plan, deployment: Deployment, *, txn: str, author: Mapping[str, Any]) -> dict[str, Any]:
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
        "adopt": plan.adopts,
        "overwrite": plan.overwrite,
        "guard": plan.guard,
        "generation": {"n": plan.to, "files": dict(plan.files), "meta": dict(plan.meta)} if new else None,
        "target": plan.to,
        "release": plan.release,
        "health": dict(plan.meta["health"]),
        "stop_timeout_s": profile.stop_timeout_s,
        "gate_timeout_s": profile.exactness.time_limit_s + LEASE_S,
        "lease_s": LEASE_S,
    }


def _doubts(deployment: Deployment) -> list[str]:
    base = deployment.profile.release_base
    why = untried_base(base)
    return [f"release_base {base}: {why}"] if why else []


def _notes(deployment: Deployment, facts: Facts, known: Known, *, lost: bool) -> list[str]:
    notes = _doubts(deployment)
    if lost and facts.state.confirmed is None and facts.unit.sha256 is not None:
        notes.append("the unit that is there is replaced: if this deploy fails, nothing runs (--adopt would keep it)")
    if deployment.host.supervisor == "process":
        notes.append("plain process, no systemd: it does not come back after a reboot")
    port = deployment.service.port
    if known.cannot_guard:
        notes.append(f"serves unproven: others reach port {port} before the verdict ({known.cannot_guard})")
    elif known.cannot_guard is None:
        notes.append(f"until confirmed only the host itself reaches port {port}: it binds {deployment.profile.bind}")
    else:
        notes.append(f"until confirmed only the host itself reaches port {port} (IPAddressDeny=, tried on the host)")
    for front in deployment.fronts:
        limit = front.router.drain_timeout_s
        notes.append(f"{front.name} sends it nothing meanwhile; what runs may finish, at most {limit} s")
    if deployment.profile.router is not None:
        notes.append("while it restarts new connections are refused; what runs may finish")
    notes += [f"rule {rule}" for rule in deployment.profile.applied_rules]
    notes += map(str, silenced_rules(deployment))
    notes += [known.evidence] if known.evidence else []
    return notes
