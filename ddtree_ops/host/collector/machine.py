"""The machine: system, interpreters, rights, clock, memory."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import importlib.util
import os
import platform
import pwd
import re
import resource
import sys
import time
from pathlib import Path

from ..agent.base import JSON, USER
from ..agent.system import glibc
from .tools import Box, line_of, whole


def system(box: Box) -> JSON:
    release = {}
    for line in line_of("/etc/os-release").splitlines():
        key, _, value = line.partition("=")
        release[key] = value.strip().strip('"')
    words = box.ask("systemctl", "--version", quiet=True).text.split()
    return {
        "hostname": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "glibc": glibc(),
        "distribution": f"{release.get('ID', '')} {release.get('VERSION_ID', '')}".strip(),
        "pid1": line_of("/proc/1/comm"),
        "systemd": whole(words[1]) if len(words) > 1 else None,
        "cmdline": [
            word
            for word in line_of("/proc/cmdline").split()
            if re.match(r"(iommu|intel_iommu|amd_iommu|pci|pcie_acs_override|swiotlb)[.=]", word)
        ],
        "uptime_s": whole(line_of("/proc/uptime").split(".")[0]),
    }


def python(box: Box) -> JSON:
    """Interpreters by version ("3.12"), and whether each can make virtual environments."""
    own = ".".join(platform.python_version_tuple()[:2])
    found = {own: importlib.util.find_spec("ensurepip") is not None and importlib.util.find_spec("venv") is not None}
    for base in ("/usr/bin", "/usr/local/bin"):
        for path in sorted(Path(base).glob("python3.*")):
            version = path.name[6:]
            if version[2:].isdigit() and version not in found and len(found) < 6:
                said = box.ask(str(path), "-I", "-c", "import ensurepip, venv", quiet=True)
                found[version] = not said.problem
    return {"running": platform.python_version(), "executable": sys.executable, "found": found}


def rights(box: Box) -> JSON:
    groups = []
    for group in os.getgroups()[:64]:
        with contextlib.suppress(KeyError):
            groups.append(grp.getgrgid(group).gr_name)
    user = False
    with contextlib.suppress(KeyError):
        user = bool(pwd.getpwnam(USER))
    name = str(os.geteuid())
    with contextlib.suppress(KeyError):
        name = pwd.getpwuid(os.geteuid()).pw_name
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "uid": os.geteuid(),
        "user": name,
        "groups": groups,
        "service_user": user,
        "memlock": None if resource.RLIM_INFINITY in (soft, hard) else hard,
    }


TIME_SERVICES = ("systemd-timesyncd", "chrony", "chronyd", "ntp", "ntpd", "ntpsec")
TIME_ERROR = 5  # adjtimex(2): the kernel's clock is not synchronised


def clock(box: Box) -> JSON:
    """The time, and who keeps it. Not by timedatectl, which starts a service to answer."""
    synchronised = None
    with contextlib.suppress(OSError, AttributeError):
        # struct timex, modes 0: only looks. Its size is 208; what is behind it is not touched.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
        synchronised = None if state < 0 else state != TIME_ERROR
    said = box.ask("systemctl", "show", "--property=ActiveState", *TIME_SERVICES, quiet=True)
    ntp = None if said.problem else "yes" if "ActiveState=active" in said.text else "no"
    return {"unix": time.time(), "synchronised": synchronised, "ntp": ntp}


def memory(box: Box) -> JSON:
    meminfo = dict(line.partition(":")[::2] for line in line_of("/proc/meminfo", 16384).splitlines())
    shm = None
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
    governors = {line_of(str(path)) for path in Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")}
    return {
        "total_kib": whole(meminfo.get("MemTotal", "").strip()),
        "available_kib": whole(meminfo.get("MemAvailable", "").strip()),
        "swap_free_kib": whole(meminfo.get("SwapFree", "").strip()),
        "shm_bytes": shm.f_frsize * shm.f_blocks if shm else None,
        "cpus": os.cpu_count(),
        "governors": sorted(governors - {""}),
        "numa_balancing": whole(line_of("/proc/sys/kernel/numa_balancing")),
    }
