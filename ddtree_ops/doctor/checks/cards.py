"""The GPUs: count, kind, health, who holds their memory."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.doctor.check import Case, Seen, check, listed
from ddtree_ops.model.archs import base_arch

GROUP = "GPUs"
#: MiB that an idle card may show as used: the driver's own.
IDLE_MIB = 1500
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
#: Xids after which a card, or its memory, is not to be trusted (NVIDIA, "XID Errors").
FATAL_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping event",
    64: "row remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC rate",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}


@check(
    "gpu-count",
    GROUP,
    "error",
    "as many GPUs as the inventory says",
    needs=("cards",),
    gpus=True,
    reference="inventories, gpus.count",
)
def gpu_count(case: Case) -> Iterator[Seen]:
    found, wanted = len(case.facts.cards.gpus), case.deployment.host.gpus.count
    on_bus = len(case.facts.driver.pci_gpus)
    if case.facts.cards.problem is None and found != wanted and not found < on_bus:
        yield Seen(
            f"{found} GPUs",
            f"{wanted} ({case.deployment.host.file})",
            "correct the inventory, or find the missing card: "
            f"{case.ssh}: lspci -d 10de: ; dmesg | grep -iE 'nvrm|xid'",
        )


@check(
    "gpu-lost",
    GROUP,
    "error",
    "every GPU on the bus answers to the driver",
    needs=("cards", "driver"),
    gpus=True,
    reference="Xid 79; NVIDIA, XID Errors",
)
def gpu_lost(case: Case) -> Iterator[Seen]:
    cards = case.facts.cards
    if cards.problem is not None:
        return
    lost = [gpu.index for gpu in cards.gpus if gpu.lost]
    if lost or len(cards.gpus) < len(case.facts.driver.pci_gpus):
        seen = (
            f"GPU {listed(lost)} is lost"
            if lost
            else (f"{len(case.facts.driver.pci_gpus)} on the bus, {len(cards.gpus)} in nvidia-smi")
        )
        yield Seen(seen, "all of them", f"{case.ssh}: dmesg | grep -i xid; drain the host, reset or power-cycle it")


@check(
    "gpu-arch",
    GROUP,
    "error",
    "the arch that the inventory says and the release is made for",
    needs=("cards", "capabilities"),
    gpus=True,
    reference="inventories, gpus.arch; a wheel without it: no kernel image",
)
def gpu_arch(case: Case) -> Iterator[Seen]:
    arch = base_arch(case.deployment.host.gpus.arch)
    wrong = {cap for cap in case.facts.capabilities.values() if cap and f"sm_{cap.replace('.', '')}" != arch}
    if wrong:
        yield Seen(
            f"compute capability {listed(sorted(wrong))}",
            f"{arch} ({case.deployment.host.file})",
            "correct gpus.arch in the inventory; the release and the rules follow from it",
        )


@check(
    "gpu-memory",
    GROUP,
    "error",
    "cards of the size that the inventory says",
    needs=("cards",),
    gpus=True,
    reference="inventories, gpus.memory_gib",
)
def gpu_memory(case: Case) -> Iterator[Seen]:
    wanted = case.deployment.host.gpus.memory_gib
    # Names are round: 96 GiB shows as 95.6, 288 GB as 268 GiB.
    wrong = [
        f"GPU {gpu.index}: {gpu.memory_total_mib / 1024:.0f} GiB"
        for gpu in case.gpus
        if gpu.memory_total_mib is not None and not 0.85 * wanted <= gpu.memory_total_mib / 1024 <= 1.15 * wanted
    ]
    if wrong:
        yield Seen(
            listed(wrong),
            f"about {wanted} GiB ({case.deployment.host.file})",
            "correct gpus.memory_gib in the inventory; is it MIG, or another card?",
        )


@check(
    "gpu-held",
    GROUP,
    "error",
    "nobody else holds memory of the service's GPUs",
    needs=("cards",),
    gpus=True,
    reference="facts of the field: orphan schedulers hold VRAM after stop",
)
def gpu_held(case: Case) -> Iterator[Seen]:
    unit = f"{case.deployment.service_name}.service"
    mine = {gpu.index for gpu in case.gpus}
    strangers = [row for row in case.facts.cards.processes if row.gpu in mine and row.unit != unit]
    if strangers:
        pids = sorted({row.pid for row in strangers if row.pid})
        yield Seen(
            listed(
                f"GPU {row.gpu}: {row.name or '?'} (pid {row.pid}, {row.memory_mib or '?'} MiB"
                f"{', ' + row.unit if row.unit else ''})"
                for row in strangers
            ),
            f"none but {unit}",
            f"{case.ssh}: ps -fp {','.join(map(str, pids))}; end what is an orphan: kill {' '.join(map(str, pids))}",
        )
        return
    # A container's processes do not show: memory that nobody holds is held all the same.
    full = [gpu for gpu in case.gpus if (gpu.memory_used_mib or 0) > IDLE_MIB]
    if full and not case.active and not any(row.gpu in mine for row in case.facts.cards.processes):
        yield Seen(
            listed(f"GPU {gpu.index}: {gpu.memory_used_mib} MiB" for gpu in full),
            "free GPUs while the service does not run",
            f"{case.ssh}: fuser -v /dev/nvidia*; containers: docker ps",
        )


@check(
    "gpu-ecc",
    GROUP,
    "error",
    "no uncorrected memory error since the driver was loaded",
    needs=("cards",),
    gpus=True,
    reference="NVIDIA GPU memory error management",
)
def gpu_ecc(case: Case) -> Iterator[Seen]:
    bad = [gpu for gpu in case.gpus if gpu.ecc_uncorrected]
    if bad:
        yield Seen(
            listed(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected errors" for gpu in bad),
            "0: results may be wrong",
            f"{case.ssh}: nvidia-smi -q -d ECC,ROW_REMAPPER -i {','.join(str(gpu.index) for gpu in bad)}; "
            "drain, reset, or replace the card",
        )


@check(
    "gpu-remap",
    GROUP,
    "error",
    "no row remapping waits or failed",
    needs=("cards",),
    gpus=True,
    reference="NVIDIA GPU memory error management, row remapping",
)
def gpu_remap(case: Case) -> Iterator[Seen]:
    for gpu in case.gpus:
        if gpu.remap_failure == "Yes":
            yield Seen(f"GPU {gpu.index}: row remapping failed", "No", "replace the card (RMA)")
        elif gpu.remap_pending == "Yes":
            yield Seen(
                f"GPU {gpu.index}: a remapped row waits for a reset",
                "No",
                f"stop the service, then {case.ssh}: nvidia-smi --gpu-reset -i {gpu.index}",
            )


@check(
    "gpu-xid",
    GROUP,
    "error",
    "no fatal error of the driver since boot",
    needs=("kernel_log",),
    gpus=True,
    reference="NVIDIA, XID Errors",
)
def gpu_xid(case: Case) -> Iterator[Seen]:
    for xid in {each.xid: each for each in case.facts.kernel_log.xids}.values():
        if xid.xid in FATAL_XIDS:
            yield Seen(
                f"Xid {xid.xid} on {xid.bus}: {FATAL_XIDS[xid.xid]}",
                "none",
                f"{case.ssh}: dmesg | grep -i xid; drain and reset or replace the card",
            )


@check(
    "gpu-throttle",
    GROUP,
    "warning",
    "no card is slowed down by heat or power",
    needs=("cards",),
    gpus=True,
    reference="nvidia-smi -q -d PERFORMANCE",
)
def gpu_throttle(case: Case) -> Iterator[Seen]:
    slowed = [(gpu, [reason for reason in gpu.throttle if reason in SLOWDOWNS]) for gpu in case.gpus]
    slowed = [(gpu, reasons) for gpu, reasons in slowed if reasons]
    if slowed:
        yield Seen(
            listed(f"GPU {gpu.index} at {gpu.temperature} C: {listed(reasons)}" for gpu, reasons in slowed),
            "no slowdown",
            f"{case.ssh}: nvidia-smi -q -d TEMPERATURE,POWER; fans, airflow, power cables",
        )


@check(
    "gpu-power",
    GROUP,
    "warning",
    "no card runs below its default power limit",
    needs=("cards",),
    gpus=True,
    reference="nvidia-smi -pl; a lower limit makes measurements of two hosts differ",
)
def gpu_power(case: Case) -> Iterator[Seen]:
    low = [
        gpu
        for gpu in case.gpus
        if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < 0.98 * gpu.power_default_w
    ]
    if low:
        yield Seen(
            listed(f"GPU {gpu.index}: {gpu.power_limit_w:.0f} W" for gpu in low),
            f"{low[0].power_default_w:.0f} W, the default",
            f"{case.ssh}: nvidia-smi -pl {low[0].power_default_w:.0f}; or silence this check with the reason",
        )


@check(
    "gpu-persistence",
    GROUP,
    "warning",
    "persistence mode, so that the driver stays up",
    needs=("cards",),
    gpus=True,
    reference="NVIDIA driver persistence",
)
def gpu_persistence(case: Case) -> Iterator[Seen]:
    off = [gpu.index for gpu in case.gpus if gpu.persistence == "Disabled"]
    if off:
        yield Seen(
            f"off on GPU {listed(off)}",
            "on: else each start, and each nvidia-smi, loads the driver's state anew",
            f"{case.ssh}: systemctl enable --now nvidia-persistenced (until reboot: nvidia-smi -pm 1)",
        )


@check(
    "gpu-mig",
    GROUP,
    "error",
    "whole cards, not slices",
    needs=("cards",),
    gpus=True,
    reference="MIG user guide: no P2P between instances",
)
def gpu_mig(case: Case) -> Iterator[Seen]:
    sliced = [gpu.index for gpu in case.gpus if gpu.mig == "Enabled"]
    if sliced:
        yield Seen(
            f"MIG is on for GPU {listed(sliced)}",
            "off: instances cannot copy to one another",
            f"{case.ssh}: nvidia-smi -mig 0 -i {','.join(map(str, sliced))}, with all users of them stopped",
        )


@check(
    "gpu-compute-mode",
    GROUP,
    "error",
    "cards that several processes may use",
    needs=("cards",),
    gpus=True,
    reference="nvidia-smi -c",
)
def gpu_compute_mode(case: Case) -> Iterator[Seen]:
    closed = [gpu for gpu in case.gpus if gpu.compute_mode not in (None, "Default")]
    if closed:
        yield Seen(
            listed(f"GPU {gpu.index}: {gpu.compute_mode}" for gpu in closed), "Default", f"{case.ssh}: nvidia-smi -c 0"
        )


@check(
    "gpu-link-width",
    GROUP,
    "warning",
    "every card has all its PCIe lanes",
    needs=("cards",),
    gpus=True,
    reference="nvidia-smi -q, GPU Link Info; a riser or a slot that lost lanes halves all-reduce over PCIe",
)
def gpu_link_width(case: Case) -> Iterator[Seen]:
    narrow = [gpu for gpu in case.gpus if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max]
    if narrow:
        yield Seen(
            listed(f"GPU {gpu.index}: x{gpu.pcie_width} of x{gpu.pcie_width_max}" for gpu in narrow),
            "all lanes",
            f"{case.ssh}: lspci -vv | grep -E 'NVIDIA|LnkSta:'; reseat the card or its riser",
        )
