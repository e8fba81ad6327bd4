"""Lock files: the exact wheels of one base for one Python, ``locks/<base>-<python tag>.txt``, in pip's own format.

A lock's comments carry what pip has no word for: ``# python: 3.11``, ``# machine: x86_64``, ``# glibc: 2.28``,
``# driver: 580`` (the oldest NVIDIA driver, where one is needed), ``# extra-index: URL`` (asked only for what the
configured indexes do not have), ``# resolve: NAME==VERSION`` (what all others are needed by) and, behind a pin,
``# via NAMES`` (which pins need it; none: it is wanted for itself). ``relock`` writes them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

LOCKS = Path(__file__).parent / "locks"
_PIN = re.compile(
    r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)\s+--hash=sha256:([0-9a-f]{64})"
    r"(?:\s+# via ([A-Za-z0-9._-]+(?:, [A-Za-z0-9._-]+)*))?"
)
_HEADER = re.compile(r"#\s*(python|machine|glibc|driver|extra-index|resolve):\s*(\S+)\s*")


@dataclass(frozen=True)
class Pin:
    """One wheel. Exactly one, so that a release's id is known before its wheels are here."""

    name: str
    version: str
    sha256: str
    via: tuple[str, ...] = ()

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
    driver: str | None = None
    resolve: str | None = None

    @property
    def requires(self) -> dict[str, Any]:
        """What a host must have, as the manifest says it."""
        return {"python": self.python, "machine": self.machine, "glibc": self.glibc, "driver": self.driver}


def parse_lock(text: str, origin: str) -> Lock:
    """Raises UsageError naming ``origin`` and the line; nothing in a lock is skipped silently."""
    header: dict[str, str] = {}
    pins: dict[str, Pin] = {}
    numbered = enumerate(text.replace("\\\n", " ").splitlines(), 1)
    for number, line in ((number, line.strip()) for number, line in numbered):
        if match := _HEADER.fullmatch(line):
            header[match[1]] = match[2]
        elif match := _PIN.fullmatch(line):
            name = normal(match[1])
            if name in pins:
                raise UsageError(f"{origin}: {name} is pinned twice")
            pins[name] = Pin(name, match[2], match[3], tuple(match[4].split(", ")) if match[4] else ())
        elif line and not line.startswith("#"):
            raise UsageError(f"{origin}: line {number}: expected name==version --hash=sha256:..., got {line[:80]!r}")
    missing = {"python", "machine", "glibc"} - header.keys()
    if missing or not pins:
        raise UsageError(f"{origin}: lacks {', '.join(sorted(missing)) or 'pins'}")
    if unknown := {name for pin in pins.values() for name in pin.via} - pins.keys():
        raise UsageError(f"{origin}: '# via' names what is not pinned: {', '.join(sorted(unknown))}")
    return Lock(
        python=header["python"],
        machine=header["machine"],
        glibc=header["glibc"],
        extra_index=header.get("extra-index"),
        pins=tuple(pins.values()),
        text=text,
        driver=header.get("driver"),
        resolve=header.get("resolve"),
    )


def normal(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_pythons(base: str) -> list[str]:
    """The Pythons, such as ``3.12``, that a base is locked for, the oldest first. Raises UsageError where none is."""
    found = re.compile(rf"{re.escape(base)}-cp3(\d+)")
    minors = sorted(int(match[1]) for stem in _stems(LOCKS) if (match := found.fullmatch(stem)))
    if not minors:
        raise UsageError(f"no lock file for {base!r}; there are: {_there()}")
    return [f"3.{minor}" for minor in minors]


def load_lock(base: str, python: str) -> Lock:
    """The lock of a base for a Python such as ``3.11``. Raises UsageError that lists what there is."""
    path = LOCKS / f"{base}-cp{python.replace('.', '')}.txt"
    if not path.is_file():
        raise UsageError(f"no lock file {path.name}; there are: {_there()}")
    lock = parse_lock(path.read_text(), path.name)
    if lock.python != python:
        raise UsageError(f"{path.name}: says python {lock.python}")
    return lock


def _there() -> str:
    return ", ".join(_stems(LOCKS))


@functools.cache
def _stems(directory: Path) -> tuple[str, ...]:
    """Asked for each host of a command, and no lock file comes while it runs."""
    return tuple(sorted(file.stem for file in directory.glob("*.txt")))
