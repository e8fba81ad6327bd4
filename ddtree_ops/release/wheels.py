"""Wheels: fetched by pip, verified by hash, read member by member against their own RECORD (PyPA, wheel format)."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import os
import re
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import Failed
from .cache import BUFFER, Cache, file_sha256
from .lock import Lock, Pin
from .udiff import plain_path


@dataclass(frozen=True)
class Member:
    """A file of a wheel: where it belongs below site-packages, and what RECORD promises of it."""

    wheel: Path
    name: str
    path: str
    sha256: str
    size: int
    executable: bool


def fetch(lock: Lock, cache: Cache) -> list[Path]:
    """All wheels of a lock, in its order, each with one of its hashes. Raises Failed with what pip said."""
    cache.wheels.mkdir(parents=True, exist_ok=True)
    found = {pin: _cached(pin, cache) for pin in lock.pins}
    missing = [pin for pin, path in found.items() if path is None]
    if missing:
        with cache.scratch() as scratch:
            _download(lock, missing, scratch)
            for pin in missing:
                wheels = list(_candidates(pin, scratch))
                if len(wheels) != 1 or file_sha256(wheels[0]) != pin.sha256:
                    raise Failed(f"{pin.requirement}: pip gave {[wheel.name for wheel in wheels] or 'nothing'}")
                found[pin] = wheels[0].replace(cache.wheels / wheels[0].name)
    return [path for path in found.values() if path is not None]


def _candidates(pin: Pin, directory: Path) -> Iterator[Path]:
    prefix = f"{re.sub('[-_.]+', '_', pin.name)}-{pin.version}-".lower()
    return (
        path for path in directory.glob("*.whl") if re.sub(r"^[^-]+", _normal, path.name).lower().startswith(prefix)
    )


def _normal(match: re.Match[str]) -> str:
    return re.sub(r"[-_.]+", "_", match[0])


def _cached(pin: Pin, cache: Cache) -> Path | None:
    return next((path for path in _candidates(pin, cache.wheels) if file_sha256(path) == pin.sha256), None)


def _download(lock: Lock, pins: list[Pin], into: Path) -> None:
    """pip's indexes and mirrors are the operator's; the lock's extra index is asked only when those do not have it."""
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{pin.requirement} --hash=sha256:{pin.sha256}\n" for pin in pins))
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"),
        *("--require-hashes", "--dest", str(into), "-r", str(requirements), *target_options(lock)),
    ]
    attempts = [[]] if lock.extra_index is None else [[], ["--extra-index-url", lock.extra_index]]
    for extra in attempts:
        done = subprocess.run([*command, *extra], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    said = done.stderr.strip() or done.stdout.strip()
    raise Failed(f"pip cannot get the wheels of this release: {said[-1500:]}", hint="see the configuration of pip")


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


def members(wheel: Path) -> list[Member]:
    """The files that a wheel installs below site-packages, RECORD apart. Raises Failed as `entries` does."""
    return [member for member in entries(wheel) if member.path]


def entries(wheel: Path) -> list[Member]:
    """All files of a wheel but RECORD itself; the path is empty for what does not go below site-packages.

    Raises Failed for anything that is not plainly sound.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            record_name = _record_name(wheel, [info.filename for info in infos])
            record = _record(wheel, archive.read(record_name).decode())
    except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError, OSError) as error:
        raise Failed(f"{wheel.name}: {error}") from error
    if len({info.filename for info in infos}) != len(infos):
        raise Failed(f"{wheel.name}: the same name twice")
    found = []
    for info in infos:
        if not plain_path(info.filename):
            raise Failed(f"{wheel.name}: refused the name {info.filename!r}")
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
            raise Failed(f"{wheel.name}: {info.filename!r} is no regular file")
        if info.filename == record_name:
            continue
        path = _site_path(info.filename)
        if info.filename not in record:
            if path is None:
                continue  # scripts and data, which are never used
            raise Failed(f"{wheel.name}: {info.filename!r} is not in RECORD")
        sha256, size = record[info.filename]
        if size != info.file_size:
            raise Failed(f"{wheel.name}: {info.filename!r} has {info.file_size} bytes, RECORD says {size}")
        executable = bool(info.external_attr >> 16 & 0o111)
        found.append(Member(wheel, info.filename, path or "", sha256, info.file_size, executable))
    return found


def _record_name(wheel: Path, names: list[str]) -> str:
    records = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(records) != 1:
        raise Failed(f"{wheel.name}: has {len(records)} RECORD files")
    return records[0]


def _record(wheel: Path, text: str) -> dict[str, tuple[str, int]]:
    """Name -> (sha256 in hex, size)."""
    entries = {}
    for row in csv.reader(io.StringIO(text)):
        name, digest, size = (*row, "", "", "")[:3]
        algorithm, _, value = digest.partition("=")
        if algorithm == "sha256":
            try:
                entries[name] = (base64.urlsafe_b64decode(value + "==").hex(), int(size))
            except ValueError as error:
                raise Failed(f"{wheel.name}: RECORD: {name!r}: {error}") from error
    return entries


def _site_path(name: str) -> str | None:
    """Where a member goes below site-packages; None for scripts, headers and data files, which no engine loads."""
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return name
    kind, _, path = rest.partition("/")
    return path if kind in ("purelib", "platlib") and path else None


def unpack(wanted: list[Member], cache: Cache) -> Iterator[Member]:
    """Puts members into the cache, in parallel; yields each once it is there. Raises Failed when RECORD is not met."""
    with contextlib.ExitStack() as stack:
        # One archive a wheel for all threads (zipfile locks its reads): opening one parses thousands of names.
        archives = {wheel: stack.enter_context(zipfile.ZipFile(wheel)) for wheel in {m.wheel for m in wanted}}
        pool = stack.enter_context(ThreadPoolExecutor(max(2, os.cpu_count() or 1)))

        def one(member: Member) -> Member:
            if not cache.has_blob(member.sha256, member.size):
                try:
                    sha256, size = cache.add_blob(_content(archives[member.wheel], member.name))
                except (zipfile.BadZipFile, zlib.error) as error:
                    raise Failed(f"{member.wheel.name}: {member.name!r}: {error}") from error
                if (sha256, size) != (member.sha256, member.size):
                    raise Failed(f"{member.wheel.name}: {member.name!r} does not match its hash in RECORD")
            return member

        # The largest first: they decide how long it takes.
        yield from pool.map(one, sorted(wanted, key=lambda member: -member.size))


def _content(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    with archive.open(name) as file:
        while chunk := file.read(BUFFER):
            yield chunk


def record_text(files: Iterable[tuple[str, str, int]], record: str) -> bytes:
    """RECORD of (name, sha256 in hex, size), sorted; ``record`` is its own name."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, sha256, size in sorted(files):
        digest = base64.urlsafe_b64encode(bytes.fromhex(sha256)).decode().rstrip("=")
        writer.writerow([name, f"sha256={digest}", size])
    writer.writerow([record, "", ""])
    return text.getvalue().encode()
