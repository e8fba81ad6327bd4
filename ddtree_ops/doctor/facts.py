"""A host's facts, typed. Everything in them is the host's word: each section is checked alone, none is trusted.

None means that the host could not tell, which is never taken for a good sign nor for a bad one.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

#: Whole numbers beyond it are no count of anything, and no float holds them.
NUMBER_LIMIT = 1 << 63
_SURROGATE = re.compile("[\ud800-\udfff]")


class System(msgspec.Struct, frozen=True):
    """Operating system; ``cmdline`` holds the kernel's arguments that touch the IOMMU and PCI alone."""

    hostname: str = ""
    kernel: str = ""
    machine: str = ""
    glibc: str = ""
    distribution: str = ""
    pid1: str = ""
    systemd: int | None = None
    cmdline: list[str] = []
    uptime_s: int | None = None


class Python(msgspec.Struct, frozen=True):
    """``found``: version such as "3.12" -> whether it can make virtual environments."""

    running: str = ""
    executable: str = ""
    found: dict[str, bool] = {}


class Rights(msgspec.Struct, frozen=True):
    """Who the collector ran as. ``memlock``: the hard limit in bytes, None without one."""

    uid: int = -1
    user: str = ""
    groups: list[str] = []
    service_user: bool = False
    memlock: int | None = None


class Clock(msgspec.Struct, frozen=True):
    """``unix``: the host's time when it looked. ``behind_s``: this machine's minus the host's, set by who asked."""

    unix: float | None = None
    synchronised: bool | None = None
    ntp: str | None = None
    behind_s: float | None = None


class Memory(msgspec.Struct, frozen=True):
    """Host memory in KiB, /dev/shm in bytes."""

    total_kib: int | None = None
    available_kib: int | None = None
    swap_free_kib: int | None = None
    shm_bytes: int | None = None
    cpus: int | None = None
    governors: list[str] = []
    numa_balancing: int | None = None


class Driver(msgspec.Struct, frozen=True):
    """The loaded module's version and the installed libraries' ones; devices under /dev; GPUs on the PCI bus."""

    module: str | None = None
    libraries: list[str] = []
    modules: list[str] = []
    devices: list[str] = []
    pci_gpus: list[str] = []
    nvidia_smi: bool = False


class Fabric(msgspec.Struct, frozen=True):
    """NVSwitches on the bus and the fabric manager, in systemd's words."""

    nvswitches: int = 0
    version: str | None = None
    loaded: bool = False
    active: str | None = None
    enabled: str | None = None


class Gpu(msgspec.Struct, frozen=True):
    """One card as ``nvidia-smi -q -x`` tells; a field it does not tell is None."""

    index: int
    name: str | None = None
    bus: str = ""
    lost: bool = False
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    persistence: str | None = None
    mig: str | None = None
    compute_mode: str | None = None
    ecc: str | None = None
    ecc_uncorrected: int = 0
    remap_pending: str | None = None
    remap_failure: str | None = None
    throttle: list[str] = []
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    numa_node: int | None = None
    iommu: str | None = None


class Holder(msgspec.Struct, frozen=True):
    """A process that holds memory of GPU ``gpu`` (its index)."""

    gpu: int = -1
    pid: int | None = None
    name: str | None = None
    memory_mib: int | None = None
    unit: str | None = None
    alive: bool = True


class Cards(msgspec.Struct, frozen=True):
    """All cards. ``problem``: why nvidia-smi told nothing."""

    problem: str | None = None
    driver: str | None = None
    cuda: str | None = None
    gpus: list[Gpu] = []
    processes: list[Holder] = []


class Xid(msgspec.Struct, frozen=True):
    """An error of NVIDIA's kernel module."""

    bus: str = ""
    xid: int = 0
    line: str = ""


class KernelLog(msgspec.Struct, frozen=True):
    """NVIDIA's errors since the boot; ``readable`` False: not ours to read."""

    readable: bool = False
    xids: list[Xid] = []


class Toolchain(msgspec.Struct, frozen=True):
    """CUDA_HOME of the profile; releases such as "12.8" of what is in it."""

    cuda_home: str | None = None
    exists: bool = False
    nvcc: str | None = None
    ptxas: str | None = None
    gcc: bool = True


Matrix = dict[str, dict[str, str]]


class Topology(msgspec.Struct, frozen=True):
    """``nvidia-smi topo -m``: {"GPU0": {"GPU1": "NV18"}}."""

    matrix: Matrix = {}
    problem: str | None = None


class Peers(msgspec.Struct, frozen=True):
    """``nvidia-smi topo -p2p r`` and ``a``: "OK" or why not (CNS, TNS, NS, ...)."""

    read: Matrix = {}
    atomics: Matrix = {}


class Bus(msgspec.Struct, frozen=True):
    """``acs``: bridges that redirect copies between GPUs to the root. ``iommu_groups``: kind -> count."""

    readable: bool = False
    acs: list[str] = []
    iommu_groups: dict[str, int] = {}


class Disk(msgspec.Struct, frozen=True):
    """What holds a path, or would."""

    exists: bool = False
    free_bytes: int | None = None
    total_bytes: int | None = None
    free_inodes: int | None = None
    writable: bool = False
    owner: int | None = None
    mount: str | None = None
    fs: str | None = None
    read_only: bool = False
    noexec: bool = False


class Dflash(msgspec.Struct, frozen=True):
    """``dflash_config`` of a drafter."""

    target_layer_ids: list[int] | None = None
    block_size: int | None = None
    num_target_layers: int | None = None
    mask_token_id: int | None = None


class ModelConfig(msgspec.Struct, frozen=True):
    """The numbers of a config.json that two models must agree on; a multimodal model's text part counts."""

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None
    block_size: int | None = None
    num_target_layers: int | None = None
    architectures: list[str] = []
    quantization: str | None = None
    dflash: Dflash | None = None


class Model(msgspec.Struct, frozen=True):
    """A model's directory: what of its weights is missing, damaged, or not for the service's user to read."""

    present: bool = False
    config: ModelConfig | None = None
    shards: int = 0
    other_weights: list[str] = []
    bytes: int = 0
    index_bytes: int | None = None
    missing: list[str] = []
    missing_count: int = 0
    fetching: list[str] = []
    problems: list[str] = []
    unreadable: list[str] = []
    fs: str | None = None


class Releases(msgspec.Struct, frozen=True):
    """Ids installed on the host, newest last."""

    installed: list[str] = []


class Proven(msgspec.Struct, frozen=True):
    """The confirmed generation's last verdict: its kind, when (Unix time), and the driver it was measured on."""

    kind: str | None = None
    at: float | None = None
    driver: str | None = None


class Service(msgspec.Struct, frozen=True):
    """The unit in systemd's words, the confirmed generation in ddtree's."""

    name: str | None = None
    load: str | None = None
    state: str | None = None
    sub: str | None = None
    result: str | None = None
    restarts: int | None = None
    pid: int | None = None
    enabled: str | None = None
    needs_reload: bool = False
    memlock: str | None = None
    nofile: int | None = None
    generation: int | None = None
    release: str | None = None
    unit_proven: Proven | None = None


class Owner(msgspec.Struct, frozen=True):
    """Who listens; ``pid`` None where we may not see it."""

    pid: int | None = None
    command: str = ""
    ours: bool = False


class Port(msgspec.Struct, frozen=True):
    """The service's port."""

    number: int | None = None
    owner: Owner | None = None


class Server(msgspec.Struct, frozen=True):
    """``/server_info`` by allow-list. ``answers`` None: it was not asked (it wants a key)."""

    answers: bool | None = None
    problem: str | None = None
    info: dict[str, Any] = {}


class LogCause(msgspec.Struct, frozen=True):
    """A known cause of death in the service's log, and the newest line that says it."""

    cause: str
    line: str = ""


class Log(msgspec.Struct, frozen=True):
    """The end of the service's log."""

    readable: bool = False
    causes: list[LogCause] = []


class Problem(msgspec.Struct, frozen=True):
    """What the collector could not find out, and why."""

    part: str = ""
    problem: str = ""


class Collector(msgspec.Struct, frozen=True):
    """The collector about itself. ``unfinished``: parts that had not ended at the limit."""

    seconds: float = 0.0
    limit_s: float = 0.0
    unfinished: list[str] = []
    problems: list[Problem] = []


class HostFacts(msgspec.Struct, frozen=True, rename={"os_": "os"}):
    """One collector's reply. ``malformed``: {section: what is wrong with it}; such a section counts as absent."""

    os_: System = System()
    python: Python = Python()
    rights: Rights = Rights()
    clock: Clock = Clock()
    memory: Memory = Memory()
    driver: Driver = Driver()
    fabric: Fabric = Fabric()
    capabilities: dict[str, str] = {}
    cards: Cards = Cards()
    kernel_log: KernelLog = KernelLog()
    toolchain: Toolchain = Toolchain()
    topology: Topology = Topology()
    peers: Peers = Peers()
    bus: Bus = Bus()
    disks: dict[str, Disk] = {}
    releases: Releases = Releases()
    service: Service = Service()
    port: Port = Port()
    server: Server = Server()
    log: Log = Log()
    models: dict[str, Model] = {}
    collector: Collector = Collector()
    no_python: str | None = None
    absent: list[str] = []
    malformed: dict[str, str] = {}


def host_facts(reply: dict[str, Any]) -> HostFacts:
    """The reply with each section checked alone. Never raises for what a host says."""
    good: dict[str, Any] = {}
    malformed: dict[str, str] = {}
    absent: list[str] = []
    for field in msgspec.structs.fields(HostFacts):
        if field.name in ("absent", "malformed"):
            continue
        if field.encode_name not in reply:
            absent.append(field.encode_name)
            continue
        try:
            refuse_impossible(reply[field.encode_name])
            good[field.name] = msgspec.convert(reply[field.encode_name], field.type)
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            malformed[field.encode_name] = str(error)[:300]
    return HostFacts(**good, absent=absent, malformed=malformed)


def refuse_impossible(value: Any) -> None:
    """Raises ValueError for a number or a text that checks cannot count with or show."""
    if isinstance(value, dict):
        refuse_impossible(list(value))
        refuse_impossible(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            refuse_impossible(each)
    elif isinstance(value, str):
        if _SURROGATE.search(value):
            raise ValueError("a text with half a surrogate pair")
    elif isinstance(value, int | float) and not (abs(value) < NUMBER_LIMIT and math.isfinite(value)):
        raise ValueError("a number that is no measure of anything")
