"""What a host says of itself: the probe's reply, typed. Everything in it is the host's word and may be hostile."""

from __future__ import annotations

from typing import Any

import msgspec

from ddtree_ops.errors import Failed


class System(msgspec.Struct, frozen=True):
    """The machine and the rights the probe ran with."""

    hostname: str = ""
    user: str = ""
    uid: int = -1
    python: str = ""
    pythons: list[str] = []
    glibc: str = ""
    machine: str = ""
    kernel: str = ""
    driver: str | None = None
    time: float = 0.0


class Pending(msgspec.Struct, frozen=True):
    """A deploy that has neither confirmed nor recovered."""

    txn: str
    to: int
    from_: int | None = msgspec.field(name="from", default=None)


class State(msgspec.Struct, frozen=True):
    """``state.json``: the generation that is proven, and the one being tried."""

    confirmed: int | None = None
    pending: Pending | None = None


class Lock(msgspec.Struct, frozen=True):
    """Who holds the service's flock, from which machine, ``what`` for. ``since`` is Unix time."""

    txn: str = ""
    who: str = ""
    client: str = ""
    what: str = ""
    since: float = 0.0
    alive: bool = False


class Generation(msgspec.Struct, frozen=True):
    """The confirmed generation: its ``generation.json`` and the sha256 of each of its files."""

    n: int
    meta: dict[str, Any] = {}
    files: dict[str, str] = {}

    @property
    def adopted(self) -> bool:
        """A hand-made unit that ``--adopt`` kept: without a profile, a release or a verdict of ours."""
        return self.meta.get("adopted") is not None


class Unit(msgspec.Struct, frozen=True):
    """The unit file as systemd sees it, or ``process.json``. ``kind``: none, file, link; ``dropins``: to sha256."""

    path: str = ""
    kind: str = "none"
    sha256: str | None = None
    text: str | None = None
    dropins: dict[str, str] = {}
    dropin_texts: dict[str, str] = {}
    enabled: str | bool | None = None
    masked: bool = False
    fragment: str | None = None


class Active(msgspec.Struct, frozen=True):
    """The running process. ``state`` is systemd's ActiveState word."""

    state: str = "inactive"
    pid: int | None = None
    since_unix: float | None = None
    restarts: int = 0


class PortOwner(msgspec.Struct, frozen=True):
    """Who listens on the service's port."""

    pid: int | None = None
    command: str = ""
    ours: bool = False


class Model(msgspec.Struct, frozen=True):
    """A model directory: present, and what identifies its weights without reading them all."""

    present: bool = False
    identity: dict[str, Any] | None = None


class Facts(msgspec.Struct, frozen=True):
    """The whole probe, one round trip. ``verdict`` confirmed the generation; ``verified``: verify-exactness's.

    ``drift`` is the host's own account of it, in its words. ``others``: what was found at a service's further nodes.
    """

    system: System
    state: State = State()
    agent_sha256: str | None = None
    disk_free: int | None = None
    releases_installed: list[str] = []
    journal_tail: list[dict[str, Any]] = []
    unfinished: str | None = None
    lock: Lock | None = None
    last_downtime_s: float | None = None
    drift: list[str] = []
    next_generation: int = 1
    adopt_generation: int = 0
    generation: Generation | None = None
    unit: Unit = Unit()
    active: Active = Active()
    port_owner: PortOwner | None = None
    verdict: dict[str, Any] | None = None
    verified: dict[str, Any] | None = None
    models: dict[str, Model] = {}
    server_info: dict[str, Any] | None = None
    others: list[Facts] = []

    @property
    def every(self) -> list[Facts]:
        """One a node, this one first."""
        return [self, *self.others]

    @property
    def last_verdict(self) -> dict[str, Any] | None:
        """The one that counts: verify-exactness's where it decided anything, else the deploy's."""
        decided = self.verified is not None and self.verified.get("kind") != "INCONCLUSIVE"
        return self.verified if decided else self.verdict


def facts(reply: dict[str, Any]) -> Facts:
    """The probe's reply as Facts; raises Failed when the host answers in another shape."""
    try:
        return msgspec.structs.replace(msgspec.convert(reply, Facts), others=[])
    except msgspec.ValidationError as error:
        raise Failed(
            f"the host's probe answered in an unknown form: {error}",
            hint="another version of ddtree-host may be installed there; deploy from a matching checkout",
        ) from error
