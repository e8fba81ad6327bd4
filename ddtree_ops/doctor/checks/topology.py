"""How the service's GPUs reach one another. All of it matters with several ranks, and not otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.doctor.check import Case, Seen, cells, check, listed

GROUP = "topology"
HANG = "NVIDIA/nccl issue 1999, vllm-project/vllm issue 33041: hang at the first all-reduce"
#: Beyond a host bridge: P2P goes through the CPU.
FAR = ("PHB", "NODE", "SYS")


def _pcie(case: Case) -> bool:
    return case.deployment.host.gpus.interconnect == "pcie" and case.profile.tp * case.profile.pp > 1


def _p2p_off(case: Case) -> bool:
    """The profile tells NCCL to stay away from copies between GPUs: then they need not work."""
    return case.profile.env.get("NCCL_P2P_DISABLE") == "1"


@check(
    "nvlink",
    GROUP,
    "error",
    "NVLink between the ranks where the inventory says so",
    needs=("topology",),
    gpus=True,
    reference="nvidia-smi topo -m; inventories, gpus.interconnect",
)
def nvlink(case: Case) -> Iterator[Seen]:
    if case.deployment.host.gpus.interconnect != "nvlink" or len(case.pairs) < 1:
        return
    without = [
        (one, other, cell)
        for one, other, cell in cells(case.facts.topology.matrix, case.pairs)
        if not cell.startswith("NV")
    ]
    if without:
        yield Seen(
            listed(f"{one}-{other}: {cell}" for one, other, cell in without),
            "NV# between all ranks",
            f"{case.ssh}: nvidia-smi nvlink -s; on boxes with NVSwitches see the fabric manager's log",
        )


@check("p2p-read", GROUP, "error", "ranks may copy from one another", needs=("peers",), gpus=True, reference=HANG)
def p2p_read(case: Case) -> Iterator[Seen]:
    if _p2p_off(case) or case.profile.tp * case.profile.pp < 2:
        return
    bad = [(one, other, cell) for one, other, cell in cells(case.facts.peers.read, case.pairs) if cell != "OK"]
    if bad:
        yield Seen(
            listed(f"{one}-{other}: {cell}" for one, other, cell in bad),
            "OK (nvidia-smi topo -p2p r)",
            'profile: env: {NCCL_P2P_DISABLE: "1"} (slower, works); then ddtree doctor --active --only all-reduce',
        )


@check(
    "p2p-atomics",
    GROUP,
    "warning",
    "atomics between ranks that are behind a host bridge",
    needs=("peers", "topology"),
    gpus=True,
    reference=HANG,
)
def p2p_atomics(case: Case) -> Iterator[Seen]:
    if not _pcie(case) or _p2p_off(case):
        return
    readable = {(one, other) for one, other, cell in cells(case.facts.peers.read, case.pairs) if cell == "OK"}
    far = {(one, other) for one, other, cell in cells(case.facts.topology.matrix, case.pairs) if cell in FAR}
    bad = [
        (one, other, cell)
        for one, other, cell in cells(case.facts.peers.atomics, sorted(readable & far))
        if cell != "OK"
    ]
    if bad:
        yield Seen(
            listed(f"{one}-{other}: {cell}" for one, other, cell in bad),
            "OK (nvidia-smi topo -p2p a), or cards below one switch",
            "prove that an all-reduce ends: ddtree doctor --active --only all-reduce; "
            'if it does not: env: {NCCL_P2P_DISABLE: "1"} in the profile',
        )


@check(
    "pcie-acs",
    GROUP,
    "error",
    "no bridge sends copies between GPUs up to the root",
    needs=("bus",),
    gpus=True,
    reference=f"{HANG}; NCCL user guide, PCI Access Control Services (ACS)",
)
def pcie_acs(case: Case) -> Iterator[Seen]:
    if _pcie(case) and not _p2p_off(case) and case.facts.bus.acs:
        yield Seen(
            f"ACS redirect is on at {listed(case.facts.bus.acs)}",
            "off on bare metal",
            f"BIOS: ACS off; until then {case.ssh}: setpci -s {case.facts.bus.acs[0]} ECAP_ACS+6.w=0 (each bridge)",
        )


@check(
    "pcie-iommu",
    GROUP,
    "error",
    "the IOMMU does not translate the GPUs' addresses",
    needs=("cards", "os"),
    gpus=True,
    reference=f"{HANG}; silent P2P corruption (facts of the field)",
)
def pcie_iommu(case: Case) -> Iterator[Seen]:
    if not _pcie(case) or _p2p_off(case):
        return
    translated = [gpu for gpu in case.gpus if gpu.iommu and gpu.iommu.upper().startswith("DMA")]
    if translated:
        line = " ".join(case.facts.os_.cmdline) or "no iommu argument"
        yield Seen(
            f"GPU {listed(gpu.index for gpu in translated)}: translated ({translated[0].iommu}); kernel: {line}",
            "identity (iommu=pt) or off",
            "kernel command line: iommu=pt (AMD also amd_iommu=on), update-grub, reboot; then prove it: "
            "ddtree doctor --active --only p2p-copy",
        )


@check(
    "numa-span",
    GROUP,
    "warning",
    "the ranks of one service on one side of the machine",
    needs=("topology",),
    gpus=True,
    reference="nvidia-smi topo -m, SYS: through the link between CPUs",
)
def numa_span(case: Case) -> Iterator[Seen]:
    if not _pcie(case) or len(case.deployment.service.gpus) == case.deployment.host.gpus.count:
        return
    apart = [(one, other) for one, other, cell in cells(case.facts.topology.matrix, case.pairs) if cell == "SYS"]
    if apart:
        yield Seen(
            listed(f"{one}-{other}" for one, other in apart) + ": SYS",
            "GPUs of one CPU",
            f"services.{case.deployment.service_name}.gpus: choose by nvidia-smi topo -m",
        )


@check(
    "numa-balancing",
    GROUP,
    "warning",
    "the kernel does not move pages under a running server",
    needs=("memory",),
    gpus=True,
    reference="CUDA and NCCL tuning: kernel.numa_balancing=0",
)
def numa_balancing(case: Case) -> Iterator[Seen]:
    nodes = {gpu.numa_node for gpu in case.facts.cards.gpus if gpu.numa_node is not None and gpu.numa_node >= 0}
    if case.facts.memory.numa_balancing and len(nodes) > 1:
        yield Seen(
            "kernel.numa_balancing = 1 on a machine of several NUMA nodes",
            "0",
            f"{case.ssh}: sysctl -w kernel.numa_balancing=0 (and in /etc/sysctl.d)",
        )
