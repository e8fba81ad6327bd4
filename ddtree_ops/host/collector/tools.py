"""Programs that are asked, bounded in size and time; files of /proc and /sys."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..agent.base import ANSI, CONTROL, JSON, read_bytes, safe

TOOL_CAP = 1 << 20
SEARCH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/cuda/bin")


class Said(NamedTuple):
    """What a program said. ``problem`` is "" when it ended with status 0 within its bounds."""

    text: str
    problem: str = ""


class Box:
    """The request, the deadline on the monotonic clock, what went wrong, and the programs that run."""

    def __init__(self, request: JSON, limit_s: float) -> None:
        self.request = request
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.problems: list[JSON] = []
        self.running: set[int] = set()
        self.path = os.pathsep.join([os.environ.get("PATH", ""), *SEARCH])

    def left(self) -> float:
        return max(0.05, self.deadline - time.monotonic())

    def text(self, key: str, default: str = "") -> str:
        value = self.request.get(key, default)
        return value if isinstance(value, str) else default

    def has(self, name: str) -> bool:
        return shutil.which(name, path=self.path) is not None

    def ask(self, *argv: str, cap: int = TOOL_CAP, quiet: bool = False) -> Said:
        """Run a program to its end, its output capped. A failure is noted unless ``quiet``; it is never raised."""
        said = self._run(list(argv), cap)
        if said.problem and not quiet:
            self.problems.append({"part": " ".join(argv)[:200], "problem": safe(said.problem, cap=500)})
        return said

    def _run(self, argv: list[str], cap: int) -> Said:
        program = shutil.which(argv[0], path=self.path)
        if program is None:
            return Said("", "not installed")
        environment = {"PATH": self.path, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "HOME": os.environ.get("HOME", "/")}
        try:
            process = subprocess.Popen(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return Said("", f"cannot be run: {error.strerror or error}")
        self.running.add(process.pid)
        output, over = bytearray(), threading.Event()

        def read() -> None:
            assert process.stdout is not None
            with contextlib.suppress(OSError, ValueError):
                while chunk := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                    output.extend(chunk)
                    if len(output) > cap:
                        over.set()
                        end_group(process.pid)
                        return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        # A little before the deadline, so that what it said so far still counts.
        wait = self.left() * 0.85
        reader.join(wait)
        late = reader.is_alive()
        if late:
            end_group(process.pid)
        try:
            code = process.wait(0.2)
        except subprocess.TimeoutExpired:  # in the kernel, beyond SIGKILL: a driver that hangs
            return Said("", f"did not end within {wait:.1f} s, not even by SIGKILL")
        self.running.discard(process.pid)
        # The output is hostile: no decoding error, no control character. Secrets go when the whole reply is made safe.
        text = CONTROL.sub("", ANSI.sub("", bytes(output[:cap]).decode("utf-8", errors="replace")))
        if over.is_set():
            return Said("", f"wrote more than {cap} bytes")
        if late:
            return Said(text, f"did not end within {wait:.1f} s")
        if code != 0:
            return Said(text, f"status {code}: {' '.join(text.split())[:300] or 'said nothing'}")
        return Said(text)

    def kill_all(self) -> None:
        for pid in list(self.running):
            end_group(pid)


def end_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def line_of(path: str, cap: int = 4096) -> str:
    """A small file's text without its newline; "" when it is absent or not ours to read."""
    # Files of /proc and /sys are regular files that say a size of 0 or 4096.
    with contextlib.suppress(OSError):
        return safe((read_bytes(Path(path), cap) or b"").decode("utf-8", errors="replace").strip())
    return ""


def number_of(text: Any) -> float | None:
    """The first number in a tool's cell such as ``12 MiB`` or ``16x``; None for N/A and the like."""
    word = str(text).strip().split(" ")[0].rstrip("xX%")
    try:
        value = float(word)
    except ValueError:
        return None
    return value if -1e15 < value < 1e15 else None  # a hostile nan or inf is no number of ours


def whole(text: Any) -> int | None:
    value = number_of(text)
    return None if value is None else int(value)


def names_in(path: str, cap: int = 4096) -> list[str]:
    """The names in a directory, sorted; empty when it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(each.name for each in Path(path).iterdir())[:cap]
    return []


def properties(text: str, keys: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` lines of ``systemctl show``."""
    got = dict(line.partition("=")[::2] for line in text.splitlines())
    return {key: got[key] for key in keys if key in got}
