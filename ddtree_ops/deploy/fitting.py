"""Which release a host gets, and whether it fits there: pins, patches and the host's own words compared. Pure."""

from __future__ import annotations

import functools
import threading
from typing import Any

from ddtree_ops.deploy.facts import System
from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.model import Deployment
from ddtree_ops.model.archs import arch_refusals
from ddtree_ops.release import Target, engine_of, locked_pythons, release_id
from ddtree_ops.release.lock import load_lock

_hashing = threading.Lock()


def target(deployment: Deployment, python: str) -> Target:
    """The release of a deployment for one Python, such as ``3.12``. Raises UsageError for a base of another engine."""
    profile, options = deployment.profile, deployment.host.release
    if engine_of(profile.release_base) != profile.engine:
        raise UsageError(f"{profile.name}: release_base {profile.release_base} is not of the engine {profile.engine}")
    return Target(
        profile.release_base,
        python,
        # The others run on CPUs, whatever else their host has.
        deployment.host.gpus.arch if profile.engine == "sglang" else "none",
        wheels=options.wheels,
        slim=options.slim,
        provided=tuple(options.provided),
    )


def release_ids(deployment: Deployment) -> dict[str, str]:
    """Python -> release id, for each Python that the base is locked for: the host's own is known after the probe."""
    pythons = locked_pythons(deployment.profile.release_base)
    with _hashing:  # hosts are planned in threads: what they share is read and hashed once
        return {python: _release_id(target(deployment, python)) for python in pythons}


@functools.cache
def _release_id(wanted: Target) -> str:
    """A command plans with the installation that it began with."""
    return release_id(wanted)


def fitting(deployment: Deployment, system: System) -> Target:
    """The release that fits the host. Raises Failed, both sides named, when none does; UsageError by an arch rule."""
    refuse_impossible(deployment)
    locked = locked_pythons(deployment.profile.release_base)
    own = ".".join(system.python.split(".")[:2])
    python = next((python for python in (own, *reversed(system.pythons)) if python in locked), None)
    if python is None:
        there = ", ".join(system.pythons) or own or "none"
        raise Failed(
            f"{deployment.host.name} has Python {there}; {deployment.profile.release_base} is made for "
            f"{' and '.join(locked)}",
            hint=f"install python{locked[-1]} there",
        )
    wanted = target(deployment, python)
    lock = load_lock(wanted.base, python)
    driver = lock.driver if wanted.arch != "none" else None
    if problems := misfits({**lock.requires, "driver": driver}, system):
        raise Failed(f"{deployment.host.name}: the release of {wanted.base} does not fit: {'; '.join(problems)}")
    return wanted


def refuse_impossible(deployment: Deployment) -> None:
    """Raise UsageError, naming rule and source, for a profile that cannot work on its host's GPUs."""
    if refusals := arch_refusals(deployment):
        raise UsageError(
            f"{deployment.profile.name} cannot work: {'; '.join(map(str, refusals))}",
            hint=f"change the profile, or say in it `checks: {{{refusals[0].rule}: {{severity: 'off', reason: WHY}}}}`",
        )


def misfits(requires: dict[str, Any], system: System) -> list[str]:
    """What of a manifest's ``requires`` a host does not meet, one line each. ``provided`` is the host's to judge."""
    found = []
    if requires["machine"] != system.machine:
        found.append(f"it is for {requires['machine']}, the host is {system.machine or 'unknown'}")
    if version_numbers(system.glibc) < version_numbers(requires["glibc"]):
        found.append(f"it needs glibc {requires['glibc']}, the host has {system.glibc or 'another libc'}")
    driver = requires["driver"]
    if driver is not None and version_numbers(system.driver) < version_numbers(driver):
        found.append(f"it needs NVIDIA driver {driver}, the host has {system.driver or 'none'}")
    return found


def version_numbers(version: str | None) -> list[int]:
    """A version's numbers, for comparing; [] for none. Hosts say it: a part that is no sane number is left out."""
    return [int(part) for part in (version or "").split(".") if part.isdecimal() and len(part) <= 9]
