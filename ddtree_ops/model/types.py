"""What an operator writes, as values: hosts, services, profiles, workspace. All frozen; none holds a secret's value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

Engine: TypeAlias = Literal["sglang", "reference", "router"]
Balancing: TypeAlias = Literal["cache_aware", "round_robin", "random", "power_of_two"]
Algorithm: TypeAlias = Literal["none", "dflash", "ddtree"]
Policy: TypeAlias = Literal["exact", "near-tie"]
Severity: TypeAlias = Literal["off", "info", "warning", "error"]


class SecretRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a secret is, never what it is: an environment variable here, or a file on the host (absolute path).

    ``secret`` names one of the host's ``secrets``; a resolved profile never has it.
    """

    env: str | None = None
    file: str | None = None
    secret: str | None = None


class Gpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs of a host. ``arch`` is "none" (then count is 0) or sm_XX; ``memory_gib`` is of one GPU."""

    count: int
    name: str
    arch: str
    memory_gib: int
    interconnect: Literal["pcie", "nvlink", "none"]


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of a rule; all that are given must hold."""

    arch: str | None = None
    engine: Engine | None = None
    algorithm: Algorithm | None = None
    min_budget: int | None = None
    max_budget: int | None = None


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profile keys that a host overrides under conditions, and why."""

    when: When
    set: dict[str, Any]
    reason: str
    file: str
    line: int


class AppliedRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that changed a resolved profile: its place, what it changed ("cuda_graph true -> false") and why."""

    name: str
    changes: list[str]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(self.changes)}: {self.reason} ({self.name})"


class Backend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service of the inventory that a router sends requests to; ``line`` and ``path``: where that was written."""

    host: str
    service: str
    line: int
    path: str

    def __str__(self) -> str:
        return f"{self.host}/{self.service}"


class Router(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A router as it is written. ``drain_timeout_s``: how long running requests may take to finish before a change;
    ``max_unavailable``: how many backends changes may take away at once.
    """

    backends: list[Backend]
    policy: Balancing
    metrics_port: int
    health_interval_s: int
    health_timeout_s: int
    drain_timeout_s: int
    max_unavailable: int
    bind: str
    open: str | None

    def names(self, host: str, service: str) -> bool:
        """Whether a service is one of its backends."""
        return any((one.host, one.service) == (host, service) for one in self.backends)


class Routing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a router runs with: ``workers`` are the base URLs of its backends, in the inventory's order."""

    workers: list[str]
    policy: Balancing
    metrics_port: int
    health_interval_s: int
    health_timeout_s: int
    drain_timeout_s: int


class Rank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of a service over several hosts; ``address``: by which the others reach it, an IP address."""

    host: str
    address: str
    line: int
    path: str


class Nodes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hosts of a service by rank; ``port``: the first of those at which they meet, on rank 0."""

    ranks: list[Rank]
    port: int


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank runs with: its own number, every rank's address, the port of rank 0 at which they meet."""

    rank: int
    addresses: list[str]
    port: int


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service of a host: which profile over which base, its port and its GPUs' indices.

    With ``router`` it is no engine, and its ``profile`` is made from its backends'. With ``nodes`` it runs on several
    hosts; ``lead`` is then the host of rank 0 where this is one of the other ranks.
    """

    profile: str
    base: str | None
    port: int
    gpus: list[int]
    line: int
    router: Router | None = None
    nodes: Nodes | None = None
    lead: str | None = None


class ReleaseOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a host takes releases. ``wheels``: all ``ship``ped, or stock ones from the host's own ``index``.

    ``slim`` leaves out what the host's GPUs never load. ``provided``: distributions that the host has outside of any
    release, ``NAME`` (in the lock's version) or ``NAME==VERSION``.
    """

    wheels: Literal["ship", "index"] = "ship"
    slim: bool = False
    provided: list[str] = []


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One inventory file. ``root`` is a directory on the host; ``identity_file`` and ``known_hosts`` are files here."""

    name: str
    address: str
    user: str
    port: int
    host_key: str | None
    known_hosts: str | None
    identity_file: str | None
    sudo: bool
    root: str
    supervisor: Literal["systemd", "process"]
    transport: Literal["ssh", "local"]
    gpus: Gpus
    services: dict[str, Service]
    rules: list[Rule]
    secrets: dict[str, SecretRef]
    file: str
    release: ReleaseOptions = ReleaseOptions()


class Exactness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the gate judges: policy, epsilon in roundings of the logit scale, and how much evidence it gathers.

    ``prompts`` is a file relative to the workspace; None means the packaged prompts. ``methods`` (EXACTNESS_METHODS):
    none means self-score, or replay where the server refuses logprobs.
    """

    policy: Policy
    epsilon_roundings: int
    concurrency: list[int]
    max_new_tokens: int
    prompts: str | None
    time_limit_s: int
    methods: list[str] = []


class CheckOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a profile takes a check of ``ddtree doctor`` or an arch rule, and why. ``off``: it is not judged."""

    severity: Severity
    reason: str


class EvidenceRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sweep that a profile stands on: its records, a file of the workspace, and their sha256 at that time."""

    records: str
    sha256: str


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A resolved profile: what the service runs. Keys whose absence means something are None; all others have a value.

    ``model`` and ``drafter`` are absolute paths on the host or ``release:<path under the release's share/>``.
    ``budget`` counts tree nodes verified a step, the root excluded; ``ladder`` has smaller ones for
    larger batches, as `ddtree_ops.engine.ladder` reads it. ``open`` is the reason for serving beyond
    loopback without a key. ``applied_rules`` says what the host's rules and those of its GPUs' arch changed. ``checks``
    is for ``ddtree doctor`` and ``evidence`` for who reads a plan; they change nothing of what runs. ``router`` is what
    a router runs with; the rest is then what its gate needs to know of its backends. ``nodes``: which rank of how many.
    """

    name: str
    base: str | None
    engine: Engine
    release_base: str
    model: str
    drafter: str | None
    algorithm: Algorithm
    budget: int | None
    topk: int | None
    ladder: str | None = None
    block_size: int
    vocab_size: int | None
    tp: int
    pp: int
    ep: int
    attention_backend: str | None
    cuda_graph: bool
    dtype: str
    memory_fraction: float | None
    context_length: int | None
    max_running_requests: int | None
    extra_args: list[str]
    env: dict[str, str]
    bind: str
    open: str | None
    api_key: SecretRef | None
    load_timeout_s: int
    stop_timeout_s: int
    min_accept_length: float | None
    exactness: Exactness
    applied_rules: list[AppliedRule]
    checks: dict[str, CheckOverride] = {}
    evidence: EvidenceRef | None = None
    router: Routing | None = None
    nodes: Group | None = None


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a value was written."""

    file: str
    line: int
    path: str


class RawProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One profile file as written: only its own keys. ``origins`` has the dotted path of each key and list item."""

    name: str
    file: str
    extends: str | None
    values: dict[str, Any]
    origins: dict[str, Origin]


class Workspace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory with ``inventories/``: its hosts and raw profiles by name.

    Hosts come in the order of ``order``, those it does not name after them. ``groups`` name hosts in an order of their
    own; ``max_unavailable`` is how many hosts a change may take away at once.
    """

    path: Path
    default_host: str | None
    hosts: dict[str, Host]
    profiles: dict[str, RawProfile]
    groups: dict[str, list[str]] = {}
    max_unavailable: int = 1


class Front(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A router in front of a service: its own deployment, what was written, the URL by which it knows the service."""

    deployment: Deployment
    router: Router
    url: str

    @property
    def name(self) -> str:
        return f"{self.deployment.host.name}/{self.deployment.service_name}"


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One service on one host with the profile resolved: what everything else takes. ``fronts``: routers before it.

    Of a service over several hosts this is rank 0's, and ``others`` are those of the further ranks, in order.
    """

    workspace_path: Path
    host: Host
    service_name: str
    service: Service
    profile: Profile
    fronts: list[Front] = []
    others: list[Deployment] = []

    @property
    def every(self) -> list[Deployment]:
        """One deployment a host that the service runs on, rank 0's first."""
        return [self, *self.others]
