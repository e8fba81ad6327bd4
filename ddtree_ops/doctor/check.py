"""What a check is, what it sees and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ddtree_ops.doctor.facts import Gpu, HostFacts
from ddtree_ops.model import Deployment, Profile
from ddtree_ops.model.archs import Arch, arch_of

Severity = Literal["error", "warning", "info"]
#: Groups in the order in which they are shown.
GROUPS = (
    "reach and rights",
    "system and Python",
    "driver, CUDA and fabric",
    "GPUs",
    "topology",
    "disk and models",
    "port",
    "service",
    "clock",
    "caches",
    "arch rules",
    "active",
)


class Seen(NamedTuple):
    """What a check saw that is not as it should be. ``severity`` None: the check's own."""

    seen: str
    expected: str
    do: str
    severity: Severity | None = None


@dataclass(frozen=True)
class Case:
    """One deployment and its host's facts: all that a check judges by."""

    deployment: Deployment
    facts: HostFacts

    @property
    def profile(self) -> Profile:
        return self.deployment.profile

    @property
    def uses_gpus(self) -> bool:
        """True when the engine opens GPUs: the reference engine never does."""
        return self.profile.engine == "sglang"

    @property
    def arch(self) -> Arch | None:
        return arch_of(self.deployment.host.gpus.arch)

    @property
    def gpus(self) -> list[Gpu]:
        """The cards of this service, those that are there."""
        wanted = set(self.deployment.service.gpus)
        return [gpu for gpu in self.facts.cards.gpus if gpu.index in wanted]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of the service's GPUs as nvidia-smi's matrices name them, each once."""
        names = [f"GPU{index}" for index in sorted(self.deployment.service.gpus)]
        return [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]

    @property
    def ssh(self) -> str:
        """How an operator gets to the host, for commands to run there."""
        host = self.deployment.host
        return f"ssh {host.user}@{host.address}" if host.transport == "ssh" else "here"

    @property
    def active(self) -> bool:
        return self.facts.service.state in ("active", "activating", "reloading")


Judge = Callable[[Case], Iterable[Seen]]


@dataclass(frozen=True)
class Check:
    """A named check. ``needs``: sections of the facts without which it cannot be judged; ``gpus``: of GPU engines."""

    id: str
    group: str
    severity: Severity
    what: str
    reference: str
    judge: Judge
    needs: tuple[str, ...] = ()
    gpus: bool = False


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be, for an operator: what was seen, what was expected, what to do."""

    id: str
    group: str
    severity: Severity
    seen: str
    expected: str
    do: str
    reference: str
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


CHECKS: dict[str, Check] = {}


def check(
    id_: str,
    group: str,
    severity: Severity,
    what: str,
    *,
    reference: str,
    needs: tuple[str, ...] = (),
    gpus: bool = False,
) -> Callable[[Judge], Judge]:
    """Register a function as a check. It yields what it saw that is not as it should be, or nothing."""
    assert group in GROUPS and id_ not in CHECKS, id_

    def register(judge: Judge) -> Judge:
        CHECKS[id_] = Check(id_, group, severity, what, reference, judge, needs, gpus)
        return judge

    return register


def gib(amount: float) -> str:
    """Bytes in GiB, for messages."""
    return f"{amount / (1 << 30):.1f} GiB"


def listed(names: Iterable[object], most: int = 8) -> str:
    """Names in a message, cut when there are many."""
    words = [str(name) for name in names]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def cells(matrix: dict[str, dict[str, str]], pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """(one, other, cell) of a matrix's pairs; a pair that the matrix does not have is left out."""
    for one, other in pairs:
        cell = matrix.get(one, {}).get(other) or matrix.get(other, {}).get(one)
        if cell:
            yield one, other, cell
