"""A plan as a file: made now, read by people, applied later exactly as it is, or refused because the host moved.

The file holds what a sealed plan holds (the rendered texts, what the host looked like), and no secret: a profile has
none. It is the workspace of today that says how to reach the host, and the file that says what to do there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.plan import Plan, expected
from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.model import Deployment, Profile, Workspace, profile_from_json, resolve
from ddtree_ops.model.types import CheckOverride

FORMAT = 1
#: Plans of a fleet are some tens of KiB a host.
SIZE_LIMIT = 64 << 20


@dataclasses.dataclass(frozen=True)
class Stored:
    """One host's plan as it lies in a file. ``machine``: the name the host gave itself; ``root``, ``supervisor``: what
    the rendered texts were made for. ``checks``: the profile's, which a generation does not keep: an arch rule that the
    plan was made without must not refuse it now.
    """

    plan: Plan
    machine: str
    root: str
    supervisor: str
    checks: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


def stored(plan: Plan, seen: Facts, deployment: Deployment) -> Stored:
    """A plan with what must still be so when it is applied."""
    checks = msgspec.to_builtins(deployment.profile.checks)
    return Stored(plan, seen.system.hostname, deployment.host.root, deployment.host.supervisor, checks)


def to_text(plans: Sequence[Stored], author: Mapping[str, Any]) -> str:
    """The file's text. Its hash covers the plans: a file that was edited or cut is refused."""
    body = [dataclasses.asdict(one) for one in plans]
    document = {"format": FORMAT, "made": time.time(), "by": dict(author), "sha256": _digest(body), "plans": body}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def read(path: Path) -> list[Stored]:
    """The plans of a file. Raises UsageError when it is none, was edited, or is of another version."""
    try:
        with path.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
        if len(data) > SIZE_LIMIT:
            raise UsageError(f"{path}: larger than {SIZE_LIMIT >> 20} MiB, which no plan is")
        document = json.loads(data.decode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a plan file ({error})", hint="ddtree plan -o FILE makes one") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path}: not a plan file of format {FORMAT}", hint="ddtree plan -o FILE makes one")
    body = document.get("plans")
    if document.get("sha256") != _digest(body):
        raise UsageError(f"{path}: the plan was edited or cut after it was made", hint="make it anew: ddtree plan -o")
    try:
        plans = msgspec.convert(body, list[Stored])
        for one in plans:
            if one.plan.changes:
                _service_of(one)
                msgspec.convert(one.checks, dict[str, CheckOverride])
    except (msgspec.ValidationError, Failed, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a plan of this ddtree ({type(error).__name__}: {error})") from error
    if not plans:
        raise UsageError(f"{path}: holds no plan", hint="ddtree plan -o FILE makes one")
    return plans


def deployment_of(workspace: Workspace, one: Stored) -> Deployment:
    """How the plan's host is reached today, with the plan's own profile and port.

    Raises UsageError when the inventory no longer has the host or service, or has it elsewhere than the plan.
    """
    plan = one.plan
    deployment = resolve(workspace, plan.host, plan.service, None)
    for what, planned, now in (
        ("root", one.root, deployment.host.root),
        ("supervisor", one.supervisor, deployment.host.supervisor),
    ):
        if planned != now:
            raise UsageError(f"{plan.host}: the plan is for {what} {planned}, the inventory says {now}")
    if not plan.changes:
        return deployment
    port, profile = _service_of(one)
    service = msgspec.structs.replace(deployment.service, port=port)
    checks = msgspec.convert(one.checks, dict[str, CheckOverride])
    profile = msgspec.structs.replace(profile, checks=checks)
    return msgspec.structs.replace(deployment, service=service, profile=profile)


def _service_of(one: Stored) -> tuple[int, Profile]:
    return int(one.plan.meta["health"]["port"]), profile_from_json(json.dumps(one.plan.meta["profile"]))


def require_unmoved(one: Stored, seen: Facts) -> None:
    """Raises Failed when the host is no longer as the plan saw it, each difference named."""
    plan = one.plan
    moved = (
        [] if seen.system.hostname == one.machine else [f"it calls itself {seen.system.hostname}, not {one.machine}"]
    )
    now = expected(seen)
    for key, then in plan.expect.items():
        if now.get(key) != then:
            moved.append(f"{key.replace('_', ' ')}: {_short(now.get(key))}, planned for {_short(then)}")
    if moved:
        raise Failed(
            f"{plan.host}: the host moved since the plan was made: {'; '.join(moved)}; nothing was changed",
            hint="make the plan anew: ddtree plan -o FILE",
        )


def require_release(one: Stored, seen: Facts, buildable: str) -> None:
    """Raises Failed when the plan's release is neither on the host nor what this checkout builds."""
    if one.plan.changes and one.plan.release not in seen.releases_installed and one.plan.release != buildable:
        raise Failed(
            f"{one.plan.host}: release {one.plan.release} is not on the host, and this checkout builds {buildable}",
            hint="make the plan anew, or deploy from the checkout that made it",
        )


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
