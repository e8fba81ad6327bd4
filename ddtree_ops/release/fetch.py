"""Wheels, fetched by pip: its indexes, mirrors, credentials and proxies are the operator's, and so is its cache.

Several pips run at once. A connection that breaks goes on at the byte where it broke (pip 25.1 and later); of a fetch
that was interrupted all whole wheels are kept, here or in pip's cache.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from ..errors import Failed
from .cache import Cache, file_sha256
from .lock import Lock, Pin
from .progress import Progress

#: Two cores are enough for four: they wait for the network. A pip takes a second to start, so each gets some wheels.
PIPS_AT_ONCE = 4
WHEELS_A_PIP = 6
RESUMES = 20
_BAR = re.compile(r"Progress (\d+) of (\d+)\s*")
_WHOLE = 1000


def fetch(lock: Lock, cache: Cache, progress: Progress = lambda what, done, total: None) -> list[Path]:
    """All wheels of a lock, in its order, each with the hash of its pin. Raises Failed with what pip said.

    A wheel in the cache counts only if its content has that hash; a damaged one is fetched again.
    """
    cache.wheels.mkdir(parents=True, exist_ok=True)
    found = {pin: _cached(pin, cache) for pin in lock.pins}
    missing = [pin for pin, path in found.items() if path is None]
    batches = [missing[at :: -(-len(missing) // WHEELS_A_PIP)] for at in range(-(-len(missing) // WHEELS_A_PIP))]
    pips = _Pips(progress, len(missing))
    with ThreadPoolExecutor(PIPS_AT_ONCE) as pool:
        running = [pool.submit(_fetch_batch, lock, batch, cache, pips) for batch in batches]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
            for one in running:
                if one.done() and not one.cancelled():
                    found |= one.result()
        finally:
            pips.stop()
            for one in running:
                one.cancel()
    return [path for path in found.values() if path is not None]


class _Pips:
    """Those that run. Adds up what they say: thousandths of wheels, because no lock knows their sizes."""

    def __init__(self, progress: Progress, wheels: int) -> None:
        self._progress, self._total = progress, wheels * _WHOLE
        self._parts: dict[object, int] = {}
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def started(self, pip: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.add(pip)
            if self._stopped:
                pip.terminate()

    def ended(self, pip: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.discard(pip)

    def stop(self) -> None:
        """Ends them: somebody interrupted us, or one of them failed."""
        with self._lock:
            self._stopped = True
            for pip in self._running:
                pip.terminate()

    def show(self, who: object, part: int) -> None:
        with self._lock:
            self._parts[who] = max(part, self._parts.get(who, 0))
            self._progress("fetching the wheels", sum(self._parts.values()), self._total)


def _fetch_batch(lock: Lock, pins: list[Pin], cache: Cache, pips: _Pips) -> dict[Pin, Path]:
    found: dict[Pin, Path] = {}
    with cache.scratch() as scratch:
        _download(lock, pins, scratch, pips)
        for pin in pins:
            wheels = list(_candidates(pin, scratch))
            if len(wheels) != 1 or file_sha256(wheels[0]) != pin.sha256:
                raise Failed(f"{pin.requirement}: pip gave {[wheel.name for wheel in wheels] or 'nothing'}")
            found[pin] = wheels[0].replace(cache.wheels / wheels[0].name)
    pips.show(pins[0], len(pins) * _WHOLE)
    return found


def _candidates(pin: Pin, directory: Path) -> Iterator[Path]:
    prefix = f"{re.sub('[-_.]+', '_', pin.name)}-{pin.version}-".lower()
    return (
        path for path in directory.glob("*.whl") if re.sub(r"^[^-]+", _normal, path.name).lower().startswith(prefix)
    )


def _normal(match: re.Match[str]) -> str:
    return re.sub(r"[-_.]+", "_", match[0])


def _cached(pin: Pin, cache: Cache) -> Path | None:
    return next((path for path in _candidates(pin, cache.wheels) if file_sha256(path) == pin.sha256), None)


def _download(lock: Lock, pins: list[Pin], into: Path, pips: _Pips) -> None:
    """The lock's extra index is asked only when pip's own do not have it."""
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{pin.requirement} --hash=sha256:{pin.sha256}\n" for pin in pins))
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"),
        *("--require-hashes", "--dest", str(into), "-r", str(requirements), *target_options(lock), *_bar_option()),
    ]
    said = ""
    for extra in [[]] if lock.extra_index is None else [[], ["--extra-index-url", lock.extra_index]]:
        code, said = _run([*command, *extra], into / "stderr.txt", pips, pins[0])
        if code == 0:
            return
    raise Failed(f"pip cannot get the wheels of this release: {said[-1500:]}", hint="see the configuration of pip")


def _bar_option() -> list[str]:
    """``raw`` says bytes in lines; pips before 24.1 do not know it and say nothing."""
    version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("pip"))
    known = version is not None and (int(version[1]), int(version[2])) >= (24, 1)
    return ["--progress-bar", "raw" if known else "off"]


def _run(command: list[str], errors: Path, pips: _Pips, who: object) -> tuple[int, str]:
    """Exit status and what it said. An option in the environment is ignored by a pip that does not know it."""
    environment = {**os.environ, "PIP_RESUME_RETRIES": str(RESUMES), "PYTHONUNBUFFERED": "1"}
    whole, said = 0, ""
    with errors.open("w+") as stderr:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        ) as pip:
            assert pip.stdout is not None
            pips.started(pip)
            for line in pip.stdout:
                if bar := _BAR.fullmatch(line):
                    done, total = int(bar[1]), max(int(bar[2]), 1)
                    pips.show(who, whole * _WHOLE + done * _WHOLE // total)
                    whole += done == total
                else:
                    said = said[-1500:] + line
            pips.ended(pip)
        stderr.seek(0)
        return pip.returncode, stderr.read().strip() or said.strip()


def target_options(lock: Lock) -> list[str]:
    """pip's options that choose wheels for the host's Python, whatever Python the client runs."""
    major, minor = (int(part) for part in lock.glibc.split("."))
    platforms = [f"manylinux_{major}_{n}_{lock.machine}" for n in range(minor, 4, -1)]
    platforms += [f"manylinux{year}_{lock.machine}" for year in ("2014", "2010", "1")]
    tag = f"cp{lock.python.replace('.', '')}"
    return [
        *("--only-binary=:all:", "--python-version", lock.python, "--implementation", "cp"),
        *(word for abi in (tag, "abi3", "none") for word in ("--abi", abi)),
        *(word for platform in platforms for word in ("--platform", platform)),
    ]
