"""Which pins of a lock go into a release: all but those that the host has already and those that --slim drops. Pure."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from .lock import Lock, Pin, normal
from .trim import TRIM, Rule, slim_rules

Wheels = Literal["ship", "index"]
_PROVIDED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.+!_-]+))?")


@dataclass(frozen=True)
class Target:
    """What a release is for.

    ``base``: a lock's name, such as ``sglang-0.5.17``. ``provided``: distributions that the host has outside of the
    release, each ``NAME`` (in the lock's version) or ``NAME==VERSION``. ``wheels``: ``ship`` sends all, ``index`` lets
    the host fetch stock wheels from its own index.
    """

    base: str
    python: str
    arch: str = "none"
    wheels: Wheels = "ship"
    slim: bool = False
    provided: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        return engine_of(self.base)


def engine_of(base: str) -> str:
    """``sglang-0.5.17`` -> ``sglang``."""
    return base.partition("-")[0]


@dataclass(frozen=True)
class Choice:
    """``pins``: what the release is made of. ``trim``: for paths. ``dropped``: rules whose distribution is out."""

    pins: tuple[Pin, ...]
    provided: dict[str, str]
    trim: tuple[Rule, ...]
    dropped: tuple[Rule, ...]


def choose(target: Target, lock: Lock) -> Choice:
    """Raises UsageError for a provided name that the lock has not, or an arch that --slim knows nothing of.

    What provided distributions need, and nothing else that is kept, is provided with them. What only dropped ones need
    stays: an import that no metadata declares would miss it.
    """
    provided = _provided(target, lock)
    roots = {pin.name for pin in lock.pins if not pin.via}
    needed = _reachable(lock, roots, set(provided))
    files, distributions = slim_rules(target.arch) if target.slim and target.engine == "sglang" else ((), ())
    dropped = tuple(rule for rule in distributions if rule.what in needed)
    without = set(provided) | {rule.what for rule in dropped}
    kept = (needed - without) - (_reachable(lock, set(provided), set()) - _reachable(lock, roots, without))
    return Choice(
        pins=tuple(pin for pin in lock.pins if pin.name in kept),
        provided=provided,
        trim=(*TRIM[target.engine], *files),
        dropped=dropped,
    )


def _provided(target: Target, lock: Lock) -> dict[str, str]:
    versions = {pin.name: pin.version for pin in lock.pins}
    root = normal(lock.resolve.partition("==")[0]) if lock.resolve else None
    found: dict[str, str] = {}
    for text in target.provided:
        match = _PROVIDED.fullmatch(text)
        name = normal(match[1]) if match else ""
        if match is None or name not in versions or name == root:
            near = difflib.get_close_matches(name, versions, 1)
            meant = f" (did you mean {near[0]}?)" if near and near[0] != name else ""
            raise UsageError(f"provided: {text!r} is no part of {target.base} that a host can have{meant}")
        if name in found:
            raise UsageError(f"provided: {name} is there twice")
        found[name] = match[2] or versions[name]
    return dict(sorted(found.items()))


def _reachable(lock: Lock, start: set[str], without: set[str]) -> set[str]:
    """``start`` and all that it needs, on ways that do not lead through ``without``."""
    kept: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name not in kept and name not in without:
            kept.add(name)
            waiting += [pin.name for pin in lock.pins if name in pin.via]
    return kept
