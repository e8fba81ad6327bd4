"""The gate alone, against what runs now: by which methods, against which golden, and recording one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.gate import gate_prompts, prove, stored, tree_of
from ddtree_ops.deploy.nodes import mixed, names, probed
from ddtree_ops.deploy.session import Session, author
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import DdtreeError, Failed, Locked, UsageError
from ddtree_ops.exactness import Verdict, golden, known_methods, load_prompts
from ddtree_ops.exactness.plan import Tree
from ddtree_ops.model import Profile, profile_from_json

RELEASE_PREFIX = "release:"


@dataclass(frozen=True)
class Ask:
    """What an operator asks beyond the profile. ``prompts``: a file instead of the profile's; ``record``: keep a
    golden, or with a tree its verify counts beside the golden that is there.
    """

    methods: tuple[str, ...] = ()
    prompts: Path | None = None
    baseline: str | None = None
    record: bool = False


@dataclass(frozen=True)
class Verified:
    """``recorded``: the golden's file where one was written."""

    profile: Profile
    verdict: Verdict
    recorded: Path | None = None


def verify(session: Session, seen: Facts, ui: Ui, ask: Ask) -> Verified:
    """Run the gate against what runs now, and record where that was asked for and the verdict is a pass.

    Raises Failed when nothing runs, Locked while a deploy has not ended, UsageError for a golden that is missing,
    stale or another's.
    """
    deployment = session.deployment
    if seen.active.state != "active":
        raise Failed(f"{deployment.host.name}: {deployment.service_name} is {seen.active.state}, nothing to verify")
    if seen.state.pending is not None:
        raise Locked(
            f"{deployment.host.name}: deploy {seen.state.pending.txn} has not ended",
            hint="it runs its own gate; if nobody is at it any more: ddtree recover",
        )
    if session.others and (why := mixed(names(deployment), probed(session).every)):
        raise Failed(f"{deployment.service_name}: {why}", hint="ddtree deploy brings them together, through the gate")
    profile, health = running_profile(session, seen)
    prompts, prompt_set = gate_prompts(profile, deployment.workspace_path)
    if ask.prompts is not None:
        prompts, prompt_set = load_prompts(ask.prompts), ask.prompts.name
    speculates = profile.algorithm != "none"
    if ask.record and speculates and profile.dtype != "float32":
        raise UsageError(
            f"verify counts are recorded in float32 only, and {profile.name} is {profile.dtype}",
            hint="tokens are recorded against a service whose algorithm is none",
        )
    methods = known_methods(ask.methods or profile.exactness.methods)
    overrides: dict[str, Any] = {"prompts": prompts, "prompt_set": prompt_set, "baseline": ask.baseline}
    if ask.record and speculates and "golden" not in methods:
        methods = (*(methods or ("self-score",)), "golden")
    identity: golden.Identity | None = None
    from_golden = "golden" in methods or ("same-seed" in methods and ask.baseline is None)
    if ask.record or from_golden:
        version = golden.prompts_version(prompt_set, prompts)
        identities = model_identities(session, seen, profile)
        identity = golden_identity(session, seen, profile, identities, version)
        overrides["tree"] = tree_of(profile, drafter_name(profile, identities))
    folder = deployment.workspace_path / golden.FOLDER
    known = golden.load(folder, identity) if identity is not None and from_golden else None
    recording = golden.Recording() if ask.record else None
    verdict = prove(
        session.transport,
        profile,
        port=int(health["port"]),
        expect=health["expect"],
        workspace=deployment.workspace_path,
        progress=ui.progress,
        overrides={**overrides, "methods": methods, "golden": known},
        recording=recording,
    )
    keep(session, seen, profile, verdict, ui)
    if recording is None or identity is None:
        return Verified(profile, verdict)
    if not verdict.passed(profile.exactness.policy):
        ui.warn("nothing is recorded: the verdict is no pass")
        return Verified(profile, verdict)
    made = merged(folder, identity, recording, overrides["tree"], known, len(prompts))
    return Verified(profile, verdict, golden.save(folder, made))


def keep(session: Session, seen: Facts, profile: Profile, verdict: Verdict, ui: Ui) -> None:
    """Store the verdict on the host, beside the generation it is of. A host that refuses leaves it unstored, loudly."""
    if seen.generation is None or seen.generation.n != seen.state.confirmed:
        return
    by = author(session.deployment.workspace_path)
    told = stored(verdict, profile, generation=seen.generation.n, system=seen.system)
    try:
        session.agent.call("record", n=seen.generation.n, verdict=told, who=by["who"], client=by["client"])
    except DdtreeError as error:
        ui.warn(f"the verdict is not stored on the host: {error.message}")


def running_profile(session: Session, seen: Facts) -> tuple[Profile, dict[str, Any]]:
    """The profile of the generation that runs, and its port and the arguments it must show.

    The inventory's where there is none: it may name another profile and port than what runs.
    """
    generation, health = seen.generation, {"port": session.deployment.service.port, "expect": {}}
    if generation is None or generation.adopted:
        return session.deployment.profile, health
    profile = profile_from_json(session.agent.call("generation", n=generation.n)["files"]["profile.json"])
    return profile, {**health, **(generation.meta.get("health") or {})}


def model_identities(session: Session, seen: Facts, profile: Profile) -> dict[str, dict[str, Any] | None]:
    """What the host tells of the profile's target and drafter, by the path that the profile gives."""
    release = ((seen.generation.meta if seen.generation else None) or {}).get("release")
    paths = {}
    for given in (profile.model, profile.drafter):
        if given is not None and given.startswith(RELEASE_PREFIX):
            rest = given.removeprefix(RELEASE_PREFIX)
            paths[given] = f"{session.deployment.host.root}/releases/{release}/share/{rest}"
        elif given is not None:
            paths[given] = given
    told = session.agent.call("probe", model_paths=list(paths.values()))["models"]
    return {given: (told.get(path) or {}).get("identity") for given, path in paths.items()}


def golden_identity(
    session: Session,
    seen: Facts,
    profile: Profile,
    identities: dict[str, dict[str, Any] | None],
    prompts: str,
) -> golden.Identity:
    """What a golden of the running service is a golden of. Raises Failed when the host cannot identify the model."""
    model = identities.get(profile.model)
    if model is None:
        raise Failed(f"{session.deployment.host.name}: {profile.model} cannot be identified there, so no golden is its")
    arch = session.deployment.host.gpus.arch
    return golden.Identity(
        model=model,
        dtype=profile.dtype,
        arch=seen.system.machine if arch == "none" else arch,
        tp=profile.tp,
        engine_base=profile.release_base,
        prompts=prompts,
        max_new_tokens=profile.exactness.max_new_tokens,
    )


def drafter_name(profile: Profile, identities: dict[str, dict[str, Any] | None]) -> str:
    """12 hex digits of what the host tells of the drafter; empty without one."""
    if profile.drafter is None:
        return ""
    told = json.dumps(identities.get(profile.drafter), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def merged(
    folder: Path,
    identity: golden.Identity,
    recording: golden.Recording,
    tree: Tree | None,
    known: golden.Golden | None,
    prompts: int,
) -> golden.Golden:
    """The golden to write: new tokens without a tree, else the known one with this tree's verify counts.

    New tokens keep the verify counts of an earlier golden of the same tokens. Raises Failed when prompts are missing.
    """
    if tree is not None and known is not None:
        if len(recording.verify_counts) < prompts:
            raise Failed("nothing is recorded: the server does not tell the verify steps of every answer")
        counts = {**known.verify_counts, tree.shape: recording.verify_counts}
        return msgspec.structs.replace(known, verify_counts=counts)
    if len(recording.prompts) < prompts:
        raise Failed(f"nothing is recorded: {len(recording.prompts)} of {prompts} prompts were answered")
    path = folder / f"{identity.key()}.json"
    earlier = golden.read(path) if path.is_file() else None
    kept = earlier.verify_counts if earlier is not None and earlier.prompts == recording.prompts else {}
    return golden.Golden(
        format=golden.FORMAT,
        identity=identity,
        prompts=recording.prompts,
        verify_counts=kept,
        sampling=recording.sampling,
        sampled=recording.sampled,
    )
