"""Lock files: the exact wheels of one engine for one Python, ``locks/<engine>-<python tag>.txt``, in pip's own format.

A lock's comments carry what pip has no word for: ``# python: 3.11``, ``# machine: x86_64``, ``# glibc: 2.28`` and
``# extra-index: URL`` (asked only for what the configured indexes do not have). ``relock`` writes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

LOCKS = Path(__file__).parent / "locks"
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)\s+--hash=sha256:([0-9a-f]{64})")
_HEADER = re.compile(r"#\s*(python|machine|glibc|extra-index):\s*(\S+)\s*")


@dataclass(frozen=True)
class Pin:
    """One wheel. Exactly one, so that a release's id is known before its wheels are here."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Lock:
    """What one release is made of, besides our own files."""

    python: str
    machine: str
    glibc: str
    extra_index: str | None
    pins: tuple[Pin, ...]
    text: str

    @property
    def requires(self) -> dict[str, str]:
        """What a host must have, as the manifest says it."""
        return {"python": self.python, "machine": self.machine, "glibc": self.glibc}


def parse_lock(text: str, origin: str) -> Lock:
    """Raises UsageError naming ``origin`` and the line; nothing in a lock is skipped silently."""
    header: dict[str, str] = {}
    pins: dict[str, Pin] = {}
    numbered = enumerate(text.replace("\\\n", " ").splitlines(), 1)
    for number, line in ((number, line.strip()) for number, line in numbered):
        if match := _HEADER.fullmatch(line):
            header[match[1]] = match[2]
        elif match := _PIN.fullmatch(line):
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            if name in pins:
                raise UsageError(f"{origin}: {name} is pinned twice")
            pins[name] = Pin(name, match[2], match[3])
        elif line and not line.startswith("#"):
            raise UsageError(f"{origin}: line {number}: expected name==version --hash=sha256:..., got {line[:80]!r}")
    missing = {"python", "machine", "glibc"} - header.keys()
    if missing or not pins:
        raise UsageError(f"{origin}: lacks {', '.join(sorted(missing)) or 'pins'}")
    return Lock(
        header["python"], header["machine"], header["glibc"], header.get("extra-index"), tuple(pins.values()), text
    )


def load_lock(engine: str, python: str) -> Lock:
    """The lock of an engine for a Python such as ``3.11``. Raises UsageError that lists what there is."""
    path = LOCKS / f"{engine}-cp{python.replace('.', '')}.txt"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in LOCKS.glob("*.txt")))
        raise UsageError(f"no lock file {path.name}; there are: {there}")
    lock = parse_lock(path.read_text(), path.name)
    if lock.python != python:
        raise UsageError(f"{path.name}: says python {lock.python}")
    return lock
