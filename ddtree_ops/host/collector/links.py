"""Links between GPUs: nvidia-smi's matrices, PCIe access control, the IOMMU."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from ..agent.base import JSON, read_bytes
from .tools import Box, line_of, names_in

ACS_CAPABILITY = 0x000D
REDIRECTS = 0b11100  # ACS control: P2P request redirect, completion redirect, upstream forwarding (PCIe 5.0, 7.7.11)


def topology(box: Box) -> JSON:
    """``matrix``: {"GPU0": {"GPU1": "NV18", ...}}; one of X, NV#, PIX, PXB, PHB, NODE, SYS."""
    if not box.has("nvidia-smi"):
        return {"matrix": {}, "numa": {}}
    said = box.ask("nvidia-smi", "topo", "-m")
    return {"matrix": matrix(said.text), "problem": said.problem or None}


def peers(box: Box) -> JSON:
    """Copies between GPUs as the driver allows them: ``read`` and ``atomics``, each {"GPU0": {"GPU1": "OK"}}."""
    if not box.has("nvidia-smi"):
        return {"read": {}, "atomics": {}}
    read, atomics = box.ask("nvidia-smi", "topo", "-p2p", "r"), box.ask("nvidia-smi", "topo", "-p2p", "a")
    return {"read": matrix(read.text), "atomics": matrix(atomics.text)}


def matrix(text: str) -> JSON:
    """A matrix that nvidia-smi draws: a head of GPU names, a row a GPU. Other devices are left out."""
    names: list[str] = []
    found: JSON = {}
    for line in text.splitlines()[:200]:
        cells = re.split(r"\t|\s{2,}| (?=GPU\d)", line.strip())
        words = [cell.strip() for cell in cells if cell.strip()]
        if not words:
            continue
        if not names:
            heads = re.findall(r"\bGPU\d+\b", line)
            if heads and len(heads) == len(set(heads)):
                names = heads
            continue
        if words[0] in names:
            row = line.strip().split()[1 : len(names) + 1]
            found[words[0]] = {name: cell[:12] for name, cell in zip(names, row) if name != words[0]}  # noqa: B905
    return found


def bus(box: Box) -> JSON:
    """Bridges whose access control sends copies between GPUs up to the root, and how devices are translated."""
    redirecting, unread = [], 0
    for name in names_in("/sys/bus/pci/devices"):
        base = f"/sys/bus/pci/devices/{name}"
        if not line_of(f"{base}/class").startswith("0x0604"):
            continue
        control = acs_control(read_bytes(Path(f"{base}/config"), 4096) or b"")
        if control is None:
            unread += 1
        elif control & REDIRECTS:
            redirecting.append(name)
    kinds: dict[str, int] = {}
    for group in names_in("/sys/kernel/iommu_groups"):
        kind = line_of(f"/sys/kernel/iommu_groups/{group}/type") or "unknown"
        kinds[kind] = kinds.get(kind, 0) + 1
    return {
        # Beyond its first 64 bytes root alone reads a device's configuration.
        "readable": os.geteuid() == 0 or not unread,
        "acs": redirecting[:64],
        "iommu_groups": kinds,
    }


def acs_control(config: bytes) -> int | None:
    """The ACS control register out of PCIe configuration space; None where it cannot be read, 0 without ACS."""
    if len(config) < 4096:
        return None if len(config) <= 64 else 0
    at, seen = 0x100, 0
    while at >= 0x100 and at + 8 <= len(config) and seen < 64:
        (head,) = struct.unpack_from("<I", config, at)
        if head & 0xFFFF == ACS_CAPABILITY:
            return int(struct.unpack_from("<H", config, at + 6)[0])
        at, seen = head >> 20, seen + 1
    return 0
