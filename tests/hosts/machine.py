"""Small things the test hosts need of the machine they run on: commands, processes, cgroups, loop devices."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CGROUPS = [Path("/sys/fs/cgroup", part) for part in ("unified", "systemd", "")]


class HarnessError(Exception):
    """The test hosts cannot be made or do not behave; the message says what to do."""


def sh(*argv: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs a command of this machine with its output captured."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, timeout=60, **options)
    if check and done.returncode:
        raise HarnessError(f"{' '.join(map(str, argv))}: {done.stderr.decode(errors='replace').strip()}")
    return done


def wait_for(what: str, ready: Callable[[], Any], seconds: float) -> Any:
    """Polls until ``ready`` answers something true; raises HarnessError naming ``what``."""
    end = time.monotonic() + seconds
    while not (answer := ready()):
        if time.monotonic() > end:
            raise HarnessError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)
    return answer


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "XZ"


def read_pid(path: Path) -> int:
    """The pid in a file, 0 when there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def is_supervisor(pid: int) -> bool:
    try:
        return alive(pid) and b"supervise.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_cgroup(cgroup: Path) -> None:
    """Kills every process of a cgroup and of those below it."""
    if (cgroup / "cgroup.kill").exists():
        (cgroup / "cgroup.kill").write_text("1")
    elif cgroup.is_dir():  # a kernel before 5.14
        for members in cgroup.rglob("cgroup.procs"):
            for pid in members.read_text().split():
                sh("kill", "-KILL", pid, check=False)


def remove_cgroup(cgroup: Path) -> None:
    for directory, _, _ in os.walk(cgroup, topdown=False):
        with contextlib.suppress(OSError):
            Path(directory).rmdir()


def is_free(image: Path) -> bool:
    """Whether no loop device holds a disk image."""
    return not sh("losetup", "-j", image).stdout


def nobody_in(cgroup: Path) -> bool:
    """Whether a cgroup and those below it have no process."""
    for directory, _, _ in os.walk(cgroup):
        with contextlib.suppress(OSError):
            if Path(directory, "cgroup.procs").read_text():
                return False
    return True
