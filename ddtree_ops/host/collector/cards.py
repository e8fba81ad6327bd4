"""GPUs: driver, fabric manager, each card's health, who holds memory, what the kernel said of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..agent.base import JSON, read_bytes, safe
from .tools import Box, line_of, names_in, number_of, properties, whole

NVIDIA_VENDOR = "0x10de"
MOST_GPUS = 64
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")


def pci_devices(classes: tuple[str, ...]) -> list[str]:
    """NVIDIA's devices on the bus whose PCI class begins with one of ``classes``."""
    found = []
    for name in names_in("/sys/bus/pci/devices"):
        base = f"/sys/bus/pci/devices/{name}"
        if line_of(f"{base}/vendor") == NVIDIA_VENDOR and line_of(f"{base}/class").startswith(classes):
            found.append(name)
    return found


def driver(box: Box) -> JSON:
    """The module that is loaded, the libraries that are installed, the devices."""
    libraries = set()
    for base in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"):
        for path in Path(base).glob("libnvidia-ml.so.*.*"):
            libraries.add(path.name[len("libnvidia-ml.so.") :])
    modules = {line.split(" ")[0] for line in line_of("/proc/modules", 1 << 18).splitlines()}
    return {
        "module": line_of("/sys/module/nvidia/version") or None,
        "libraries": sorted(libraries),
        "modules": sorted(modules & {"nvidia", "nvidia_uvm", "nvidia_peermem", "nouveau", "nvidia_modeset"}),
        "devices": [name for name in names_in("/dev") if name.startswith("nvidia")],
        "pci_gpus": pci_devices(("0x0300", "0x0302")),
        "nvidia_smi": box.has("nvidia-smi"),
    }


def fabric(box: Box) -> JSON:
    """NVSwitches on the bus, and the fabric manager that they need."""
    switches = len(pci_devices(("0x0680",)))
    keys = ("LoadState", "ActiveState", "UnitFileState")
    shown: dict[str, str] = {}
    if switches or box.has("nv-fabricmanager"):
        said = box.ask("systemctl", "show", "nvidia-fabricmanager.service", f"--property={','.join(keys)}")
        shown = properties(said.text, keys)
    version = None
    if box.has("nv-fabricmanager"):
        found = re.search(r"(\d+\.\d+(?:\.\d+)?)", box.ask("nv-fabricmanager", "--version").text)
        version = found[1] if found else None
    return {
        "nvswitches": switches,
        "version": version,
        "loaded": shown.get("LoadState") == "loaded",
        "active": shown.get("ActiveState"),
        "enabled": shown.get("UnitFileState"),
    }


def capabilities(box: Box) -> JSON:
    """{PCI bus id: compute capability such as "12.0"}: not part of ``nvidia-smi -q``."""
    if not box.has("nvidia-smi"):
        return {}
    said = box.ask("nvidia-smi", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader")
    rows = [line.split(",") for line in said.text.splitlines()[:MOST_GPUS]]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


def gpus(box: Box) -> JSON:
    """``nvidia-smi -q -x``: {"driver", "cuda", "gpus": [...], "processes": [...], "problem"}."""
    if not box.has("nvidia-smi"):
        return {"problem": "nvidia-smi is not installed", "gpus": []}
    said = box.ask("nvidia-smi", "-q", "-x", cap=4 << 20)
    if said.problem:
        return {"problem": said.problem, "gpus": []}
    # expat resolves entities, and a few nested ones grow to gigabytes; nvidia-smi declares none.
    if "<!ENTITY" in said.text:
        return {"problem": "nvidia-smi -q -x declares XML entities", "gpus": []}
    try:
        root = ElementTree.fromstring(said.text)
    except (ElementTree.ParseError, ValueError) as error:
        box.problems.append({"part": "nvidia-smi -q -x", "problem": f"not XML: {error}"})
        return {"problem": f"nvidia-smi -q -x: not XML: {error}", "gpus": []}
    nodes = root.findall("gpu")
    rows = [(i, row) for i, node in enumerate(nodes[:MOST_GPUS]) for row in node.findall("processes/process_info")]
    return {
        "problem": None,
        "driver": word(root, "driver_version"),
        "cuda": word(root, "cuda_version"),
        "gpus": [card(index, node) for index, node in enumerate(nodes[:MOST_GPUS])],
        "processes": [process(index, row) for index, row in rows[:512]],
    }


def word(node: Any, *paths: str) -> str | None:
    """The text of the first of the elements that is there and says something."""
    for path in paths:
        text = (node.findtext(path) or "").strip()
        if text and text.upper() not in ("N/A", "[N/A]", "UNKNOWN ERROR", "GPU IS LOST"):
            return safe(text, cap=300)
    return None


def card(index: int, node: Any) -> JSON:
    reasons: Any = next(
        (found for found in map(node.find, ("clocks_event_reasons", "clocks_throttle_reasons")) if found is not None),
        [],
    )
    active = [
        re.sub(r"^clocks_(event|throttle)_reasons?_", "", str(each.tag))
        for each in reasons
        if (each.text or "").strip() == "Active"
    ]
    bus = word(node, "pci/pci_bus_id") or str(node.get("id"))
    uncorrected = [
        whole(each.text)
        for kind in ("volatile",)
        for each in node.findall(f"ecc_errors/{kind}/*")
        if "uncorrectable" in str(each.tag)
    ]
    link = "pci/pci_gpu_link_info"
    return {
        "index": index,
        "name": word(node, "product_name"),
        "bus": bus,
        "lost": "lost" in ElementTree.tostring(node, "unicode")[:20000].lower(),
        "memory_total_mib": whole(word(node, "fb_memory_usage/total")),
        "memory_used_mib": whole(word(node, "fb_memory_usage/used")),
        "utilization": whole(word(node, "utilization/gpu_util")),
        "temperature": whole(word(node, "temperature/gpu_temp")),
        "power_limit_w": number_of(
            word(
                node,
                "gpu_power_readings/current_power_limit",
                "power_readings/power_limit",
                "gpu_power_readings/power_limit",
            )
        ),
        "power_default_w": number_of(
            word(node, "gpu_power_readings/default_power_limit", "power_readings/default_power_limit")
        ),
        "persistence": word(node, "persistence_mode"),
        "mig": word(node, "mig_mode/current_mig"),
        "compute_mode": word(node, "compute_mode"),
        "ecc": word(node, "ecc_mode/current_ecc"),
        "ecc_uncorrected": sum(count for count in uncorrected if count),
        "remap_pending": word(node, "remapped_rows/remapped_row_pending"),
        "remap_failure": word(node, "remapped_rows/remapped_row_failure"),
        "throttle": sorted(active),
        "pcie_gen": whole(word(node, f"{link}/pcie_gen/current_link_gen")),
        "pcie_gen_max": whole(word(node, f"{link}/pcie_gen/max_link_gen")),
        "pcie_width": whole(word(node, f"{link}/link_widths/current_link_width")),
        "pcie_width_max": whole(word(node, f"{link}/link_widths/max_link_width")),
        "fabric_state": word(node, "fabric/state"),
        "fabric_status": word(node, "fabric/status"),
        "numa_node": whole(line_of(f"/sys/bus/pci/devices/{sysfs_name(bus)}/numa_node")),
        "iommu": line_of(f"/sys/bus/pci/devices/{sysfs_name(bus)}/iommu_group/type") or None,
    }


def process(index: int, row: Any) -> JSON:
    pid = whole(word(row, "pid"))
    return {
        "gpu": index,
        "pid": pid,
        "name": word(row, "process_name"),
        "memory_mib": whole(word(row, "used_memory")),
        "unit": unit_of(pid) if pid else None,
        "alive": bool(pid) and Path(f"/proc/{pid}").exists(),
    }


def unit_of(pid: int) -> str | None:
    """The systemd unit whose control group the process is in."""
    found = re.findall(r"/([^/\n]+\.(?:service|scope))", line_of(f"/proc/{pid}/cgroup"))
    return found[-1] if found else None


def sysfs_name(bus: str) -> str:
    """``00000000:1B:00.0`` as ``0000:1b:00.0``; nothing else may become part of a path."""
    found = re.fullmatch(r"(?:[0-9A-Fa-f]{4})?([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", bus.strip())
    return found[1].lower() if found else "none"


def kernel_log(box: Box) -> JSON:
    """NVIDIA's Xid errors since the boot, the newest last; None where the log is not ours to read."""
    if box.has("journalctl"):
        said = box.ask(
            "journalctl",
            "-k",
            "-b",
            "-q",
            "--no-pager",
            "-o",
            "short-unix",
            "--grep=NVRM: Xid",
            "-n",
            "200",
            quiet=True,
        )
        # journalctl ends with 1 when nothing matches; as a user without rights it says so.
        if not said.problem or said.problem == "status 1: said nothing":
            return {"readable": os.geteuid() == 0 or bool(said.text), "xids": xids(said.text)}
    said = box.ask("dmesg", quiet=True)
    return {"readable": not said.problem, "xids": xids(said.text)}


def xids(text: str) -> list[JSON]:
    found = []
    for line in text.splitlines():
        match = XID.search(line)
        if match:
            found.append({"bus": match[1].lower(), "xid": int(match[2][:6]), "line": line.strip()[:300]})
    return found[-50:]


def toolchain(box: Box) -> JSON:
    """CUDA_HOME as the profile pins it, its ptxas, and the compilers that kernels are built with at run time."""
    home = box.text("cuda_home")
    found: JSON = {"cuda_home": home or None, "exists": bool(home) and Path(home).is_dir(), "nvcc": None, "ptxas": None}
    for name in ("nvcc", "ptxas"):
        path = f"{home}/bin/{name}"
        if home and os.access(path, os.X_OK):
            release = re.search(r"release (\d+\.\d+)", box.ask(path, "--version").text)
            found[name] = release[1] if release else "unknown"
    return {**found, "gcc": box.has("gcc") or box.has("cc")}


def modprobe(box: Box) -> JSON:
    """Kernel module options that matter for copies between GPUs."""
    text = (read_bytes(Path("/proc/driver/nvidia/params")) or b"").decode("utf-8", errors="replace")
    keys = ("RegistryDwords", "GrdmaPciTopoCheckOverride", "EnableResizableBar")
    return {
        key: value.strip()[:200] for key, _, value in (line.partition(":") for line in text.splitlines()) if key in keys
    }
