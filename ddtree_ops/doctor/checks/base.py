"""Reach and rights, the system, its Python, its memory, its clock."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.deploy.fitting import version_numbers
from ddtree_ops.doctor.check import Case, Seen, check, gib, listed
from ddtree_ops.release import locked_pythons
from ddtree_ops.release.lock import Lock, load_lock

RIGHTS, SYSTEM = "reach and rights", "system and Python"
FACTS = "docs/doctor.md, the collector"
MOST_CLOCK_OFF_S = 30.0


@check(
    "facts-python",
    RIGHTS,
    "error",
    "a Python that can run the collector and ddtree-host",
    reference="README, requirements of a host",
)
def facts_python(case: Case) -> Iterator[Seen]:
    if case.facts.no_python is not None:
        found = case.facts.no_python.strip()
        yield Seen(
            f"python3 {found}" if found else "no python3",
            "Python 3.9 or newer as python3",
            f"{case.ssh}: install python3 (Debian, Ubuntu: apt-get install python3 python3-venv)",
        )


@check("facts-malformed", RIGHTS, "error", "facts of the form that this ddtree reads", reference=FACTS)
def facts_malformed(case: Case) -> Iterator[Seen]:
    for section, problem in case.facts.malformed.items():
        yield Seen(
            f"{section}: {problem}",
            "facts of the collector's own form",
            "a tool on the host answers in an unknown form: run it there by hand; "
            "checks that need this section were not made",
        )
    if case.facts.no_python is not None:
        return
    told = {*case.facts.collector.unfinished, *(problem.part for problem in case.facts.collector.problems)}
    missing = [section for section in case.facts.absent if section != "no_python" and section not in told]
    if missing:
        yield Seen(
            f"no {listed(missing)}, and not why",
            "every section, or the collector's word on why not",
            "these facts were cut or are not a collector's: collect them anew; checks that need them were not made",
        )


@check("facts-incomplete", RIGHTS, "error", "every part of the collector ends in time", reference=FACTS)
def facts_incomplete(case: Case) -> Iterator[Seen]:
    for part in case.facts.collector.unfinished:
        yield Seen(
            f"{part} had not ended after {case.facts.collector.limit_s:g} s",
            "an answer in that time",
            "a slow or hanging tool or disk: run again with --patience 30; checks that need it were not made",
        )


@check("facts-tools", RIGHTS, "warning", "no tool on the host hangs, floods or fails", reference=FACTS)
def facts_tools(case: Case) -> Iterator[Seen]:
    supervised = case.deployment.host.supervisor == "systemd"
    for problem in case.facts.collector.problems:
        of_gpus = problem.part.startswith("nvidia-smi")
        # Where nvidia-smi does not answer at all, driver-missing says so once.
        if of_gpus and (not case.uses_gpus or case.facts.cards.problem is not None):
            continue
        if "not been booted with systemd" in problem.problem and not supervised:
            continue
        yield Seen(
            f"{problem.part}: {problem.problem}",
            "an answer; what it would have told was not judged",
            f"{case.ssh}: {problem.part}",
            "error" if of_gpus else None,
        )


@check(
    "rights-root",
    RIGHTS,
    "error",
    "root on a host whose service systemd keeps",
    needs=("rights",),
    reference="README, rights on a host",
)
def rights_root(case: Case) -> Iterator[Seen]:
    if case.deployment.host.supervisor == "systemd" and case.facts.rights.uid != 0:
        yield Seen(
            f"looked as {case.facts.rights.user} (uid {case.facts.rights.uid})",
            "root, directly or by sudo -n",
            "inventory: sudo: true, and on the host `"
            f"{case.facts.rights.user} ALL=(ALL) NOPASSWD: ALL` in sudoers; or user: root",
        )


@check(
    "os-machine",
    SYSTEM,
    "error",
    "the machine that releases are built for",
    needs=("os",),
    reference="the base's lock file",
)
def os_machine(case: Case) -> Iterator[Seen]:
    wanted = _lock(case).machine
    if case.facts.os_.machine != wanted:
        yield Seen(case.facts.os_.machine or "unknown", wanted, "no release exists for it: use another host")


@check(
    "os-glibc",
    SYSTEM,
    "error",
    "a C library that the release's wheels load with",
    needs=("os",),
    reference="the base's lock file; PEP 600",
)
def os_glibc(case: Case) -> Iterator[Seen]:
    wanted = _lock(case).glibc
    if version_numbers(case.facts.os_.glibc) < version_numbers(wanted):
        yield Seen(
            f"glibc {case.facts.os_.glibc or 'unknown'}",
            f"glibc {wanted} or newer",
            "upgrade the distribution; wheels of this base do not load here",
        )


@check(
    "os-systemd",
    SYSTEM,
    "error",
    "systemd, in a version that knows the unit's directives",
    needs=("os",),
    reference="systemd.exec(5), LoadCredential= (since 247)",
)
def os_systemd(case: Case) -> Iterator[Seen]:
    if case.deployment.host.supervisor != "systemd":
        return
    if case.facts.os_.pid1 != "systemd":
        yield Seen(
            f"PID 1 is {case.facts.os_.pid1 or 'unknown'}",
            "systemd",
            "inventory: supervisor: process, or a host that boots systemd",
        )
    elif (case.facts.os_.systemd or 0) < 247:
        yield Seen(f"systemd {case.facts.os_.systemd or 'unknown'}", "systemd 247 or newer", "upgrade the distribution")


@check(
    "os-python",
    SYSTEM,
    "error",
    "a Python that the profile's base is locked for",
    needs=("python",),
    reference="ddtree_ops/release/locks/",
)
def os_python(case: Case) -> Iterator[Seen]:
    locked = locked_pythons(case.profile.release_base)
    if not set(locked) & set(case.facts.python.found):
        yield Seen(
            f"Python {listed(case.facts.python.found) or 'none'}",
            f"Python {' or '.join(locked)}",
            f"{case.ssh}: install python{locked[-1]} and python{locked[-1]}-venv",
        )


@check(
    "os-venv",
    SYSTEM,
    "error",
    "that Python can make virtual environments",
    needs=("python",),
    reference="Debian splits ensurepip off into python3-venv",
)
def os_venv(case: Case) -> Iterator[Seen]:
    usable = [one for one in locked_pythons(case.profile.release_base) if one in case.facts.python.found]
    if usable and not any(case.facts.python.found[one] for one in usable):
        yield Seen(
            f"python{usable[-1]} without venv or ensurepip",
            "both",
            f"{case.ssh}: apt-get install python{usable[-1]}-venv",
        )


@check(
    "memory-shm",
    SYSTEM,
    "warning",
    "shared memory for the ranks of one service",
    needs=("memory",),
    gpus=True,
    reference="NCCL user guide, Shared memory",
)
def memory_shm(case: Case) -> Iterator[Seen]:
    size, least = case.facts.memory.shm_bytes, (1 << 30) * max(1, case.profile.tp // 2)
    if size is not None and case.profile.tp > 1 and size < least:
        yield Seen(
            f"/dev/shm of {gib(size)}",
            f"at least {gib(least)} for {case.profile.tp} ranks",
            f"{case.ssh}: mount -o remount,size={least >> 30}G /dev/shm (and in /etc/fstab)",
        )


@check(
    "memory-host",
    SYSTEM,
    "warning",
    "host memory to load the weights through",
    needs=("memory",),
    gpus=True,
    reference="SGLang reads safetensors by mmap; what does not fit is read again",
)
def memory_host(case: Case) -> Iterator[Seen]:
    available = case.facts.memory.available_kib
    if available is not None and available < 16 << 20:
        yield Seen(
            f"{gib(available * 1024)} available",
            "at least 16 GiB while a server starts",
            f"{case.ssh}: ps aux --sort=-rss | head; stop what is not needed",
        )


@check(
    "clock-offset",
    "clock",
    "error",
    "the host's clock agrees with this machine's",
    needs=("clock",),
    reference="leases and verdicts are dated",
)
def clock_offset(case: Case) -> Iterator[Seen]:
    off = case.facts.clock.behind_s
    if off is not None and abs(off) > MOST_CLOCK_OFF_S:
        yield Seen(
            f"{abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} this machine",
            f"within {MOST_CLOCK_OFF_S:.0f} s",
            f"{case.ssh}: timedatectl set-ntp true (and look at this machine's own clock)",
        )


@check(
    "clock-sync",
    "clock",
    "warning",
    "something keeps the host's clock right",
    needs=("clock",),
    reference="timedatectl(1)",
)
def clock_sync(case: Case) -> Iterator[Seen]:
    if case.facts.clock.synchronised is False and case.facts.clock.ntp == "no":
        yield Seen(
            "NTP is off and the clock is not synchronised",
            "a running time service",
            f"{case.ssh}: timedatectl set-ntp true",
        )


def _lock(case: Case) -> Lock:
    return load_lock(case.profile.release_base, locked_pythons(case.profile.release_base)[-1])
