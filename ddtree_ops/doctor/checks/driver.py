"""Driver, CUDA and the fabric manager."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.deploy.fitting import version_numbers
from ddtree_ops.doctor.check import Case, Seen, check, listed
from ddtree_ops.model.archs import base_arch
from ddtree_ops.release import locked_pythons
from ddtree_ops.release.lock import load_lock

GROUP = "driver, CUDA and fabric"
FIELD = "facts of the field"


@check(
    "driver-missing",
    GROUP,
    "error",
    "an NVIDIA driver that is loaded and answers",
    needs=("driver", "cards"),
    gpus=True,
    reference="NVIDIA driver installation guide",
)
def driver_missing(case: Case) -> Iterator[Seen]:
    driver, cards = case.facts.driver, case.facts.cards
    if "nouveau" in driver.modules:
        return
    if driver.module is None:
        on_bus = f"; {len(driver.pci_gpus)} NVIDIA GPUs are on the bus" if driver.pci_gpus else ""
        yield Seen(
            f"the kernel module nvidia is not loaded{on_bus}",
            "a loaded driver",
            f"{case.ssh}: modprobe nvidia; dmesg | grep -i nvrm | tail; after a kernel update: dkms status",
        )
    elif not driver.nvidia_smi:
        yield Seen(
            "nvidia-smi is not installed",
            "the driver's own tools",
            f"{case.ssh}: install nvidia-utils of version {driver.module}",
        )
    elif cards.problem is not None and not _mismatch(case):
        yield Seen(
            f"nvidia-smi does not answer: {cards.problem}",
            "a list of GPUs",
            f"{case.ssh}: timeout 30 nvidia-smi; dmesg | grep -iE 'nvrm|xid' | tail",
        )


@check(
    "driver-nouveau",
    GROUP,
    "error",
    "nouveau does not hold the GPUs",
    needs=("driver",),
    gpus=True,
    reference="NVIDIA driver installation guide, Nouveau",
)
def driver_nouveau(case: Case) -> Iterator[Seen]:
    if "nouveau" in case.facts.driver.modules:
        yield Seen(
            "the module nouveau is loaded",
            "the module nvidia",
            f"{case.ssh}: echo 'blacklist nouveau' > /etc/modprobe.d/nouveau.conf; update-initramfs -u; reboot",
        )


@check(
    "driver-version",
    GROUP,
    "error",
    "a driver new enough for the release's CUDA",
    needs=("driver",),
    gpus=True,
    reference="the base's lock file (# driver:); CUDA compatibility guide",
)
def driver_version(case: Case) -> Iterator[Seen]:
    base = case.profile.release_base
    least, module = load_lock(base, locked_pythons(base)[-1]).driver, case.facts.driver.module
    if least and module and version_numbers(module) < version_numbers(least):
        yield Seen(f"driver {module}", f"{least} or newer for {base}", f"{case.ssh}: install driver {least}, reboot")


@check(
    "driver-library",
    GROUP,
    "error",
    "the loaded module and the installed libraries are of one version",
    needs=("driver", "cards"),
    gpus=True,
    reference="NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)
def driver_library(case: Case) -> Iterator[Seen]:
    if _mismatch(case):
        driver = case.facts.driver
        yield Seen(
            f"module {driver.module}, libraries {listed(driver.libraries) or 'unknown'}",
            "one version",
            "an upgrade without a reboot: reboot, or unload and load the modules with all GPU users stopped",
        )


@check(
    "driver-uvm",
    GROUP,
    "error",
    "the devices that CUDA opens are there",
    needs=("driver",),
    gpus=True,
    reference="nvidia-modprobe(1)",
)
def driver_uvm(case: Case) -> Iterator[Seen]:
    driver = case.facts.driver
    if driver.module is None:
        return
    missing = [name for name in ("nvidiactl", "nvidia-uvm") if name not in driver.devices]
    if missing:
        yield Seen(
            f"no /dev/{' nor /dev/'.join(missing)}",
            "both, before an unprivileged service starts",
            f"{case.ssh}: nvidia-modprobe -u -c 0; enable nvidia-persistenced so that it is so after boot",
        )


@check(
    "fabric-manager",
    GROUP,
    "error",
    "a fabric manager that runs where there are NVSwitches",
    needs=("fabric",),
    gpus=True,
    reference="CUDA error 802, system not yet initialized; NVIDIA Fabric Manager user guide",
)
def fabric_manager(case: Case) -> Iterator[Seen]:
    fabric = case.facts.fabric
    if not fabric.nvswitches or fabric.active == "active":
        return
    what = f"nvidia-fabricmanager is {fabric.active or 'absent'}" if fabric.loaded else "no nvidia-fabricmanager"
    yield Seen(
        f"{fabric.nvswitches} NVSwitches, {what}",
        "an active nvidia-fabricmanager, else CUDA ends with error 802",
        f"{case.ssh}: install nvidia-fabricmanager of version {case.facts.driver.module}; "
        "systemctl enable --now nvidia-fabricmanager; journalctl -u nvidia-fabricmanager -n 50",
    )


@check(
    "fabric-version",
    GROUP,
    "error",
    "fabric manager and driver are of one version",
    needs=("fabric", "driver"),
    gpus=True,
    reference="NVIDIA Fabric Manager user guide: versions must match",
)
def fabric_version(case: Case) -> Iterator[Seen]:
    fabric, module = case.facts.fabric, case.facts.driver.module
    if fabric.nvswitches and fabric.version and module and fabric.version != module:
        yield Seen(
            f"fabric manager {fabric.version}, driver {module}",
            "one version: one digit off is error 802",
            f"{case.ssh}: install nvidia-fabricmanager {module}; systemctl restart nvidia-fabricmanager",
        )


@check(
    "fabric-state",
    GROUP,
    "error",
    "every GPU has joined the NVLink fabric",
    needs=("cards",),
    gpus=True,
    reference="nvidia-smi -q, Fabric: State",
)
def fabric_state(case: Case) -> Iterator[Seen]:
    if case.facts.fabric.nvswitches and case.facts.fabric.active != "active":
        return
    waiting = [gpu for gpu in case.gpus if gpu.fabric_state not in (None, "Completed", "Not Supported", "Not Started")]
    waiting += [
        gpu for gpu in case.gpus if gpu.fabric_state == "Completed" and gpu.fabric_status not in (None, "Success")
    ]
    if waiting:
        yield Seen(
            listed(f"GPU {gpu.index}: {gpu.fabric_state}, {gpu.fabric_status or '?'}" for gpu in waiting),
            "Completed, Success",
            f"{case.ssh}: journalctl -u nvidia-fabricmanager -n 50; systemctl restart nvidia-fabricmanager",
        )


@check(
    "cuda-home",
    GROUP,
    "warning",
    "the CUDA_HOME that the profile pins is there",
    needs=("toolchain",),
    gpus=True,
    reference="kernels are compiled at run time; another CUDA_HOME is another cache key: 12 -> 30 min first start",
)
def cuda_home(case: Case) -> Iterator[Seen]:
    tools = case.facts.toolchain
    if tools.cuda_home and not tools.exists:
        yield Seen(
            f"no {tools.cuda_home}",
            "the toolkit that the profile's env pins",
            f"{case.ssh}: ls -d /usr/local/cuda*; install the toolkit, or change env.CUDA_HOME in the profile",
        )


@check(
    "ptxas-arch",
    GROUP,
    "warning",
    "the pinned CUDA's ptxas knows the arch",
    needs=("toolchain",),
    gpus=True,
    reference="ptxas of 12.8 does not know sm_103a, of 12.9 it does (seen with the binaries in Triton 3.6.0)",
)
def ptxas_arch(case: Case) -> Iterator[Seen]:
    tools, arch = case.facts.toolchain, base_arch(case.deployment.host.gpus.arch)
    least = {"sm_90": "11.8", "sm_100": "12.8", "sm_103": "12.9", "sm_120": "12.8"}.get(arch)
    if least and tools.ptxas and version_numbers(tools.ptxas) < version_numbers(least):
        yield Seen(
            f"{tools.cuda_home}/bin/ptxas is of CUDA {tools.ptxas}",
            f"{least} or newer for {arch}",
            f"{case.ssh}: install CUDA {least}; or unset TRITON_PTXAS_PATH so that Triton uses its own",
        )


@check(
    "compiler",
    GROUP,
    "warning",
    "a C compiler: Triton builds its launchers with it",
    needs=("toolchain",),
    gpus=True,
    reference="Triton runtime/build.py: RuntimeError, Failed to find C compiler",
)
def compiler(case: Case) -> Iterator[Seen]:
    if not case.facts.toolchain.gcc:
        yield Seen("neither gcc nor cc", "one of them", f"{case.ssh}: apt-get install gcc libc6-dev")


def _mismatch(case: Case) -> bool:
    driver = case.facts.driver
    said = "version mismatch" in (case.facts.cards.problem or "").lower()
    return said or bool(driver.module and driver.libraries and driver.module not in driver.libraries)
