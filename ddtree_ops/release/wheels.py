"""Wheels, read member by member against their own RECORD (PyPA, wheel format)."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import Failed
from .cache import BUFFER, Cache
from .udiff import plain_path

PROGRAMS = "../../../bin/"
"""Where a venv's programs lie as seen from its site-packages; installers write it so into RECORD."""


@dataclass(frozen=True)
class Member:
    """A file of a wheel: where it belongs, relative to site-packages, and what RECORD promises of it."""

    wheel: Path
    name: str
    path: str
    sha256: str
    size: int
    executable: bool


def members(wheel: Path) -> list[Member]:
    """The files that a wheel installs below site-packages, RECORD apart. Raises Failed as `entries` does."""
    return [member for member in installed(wheel) if not member.path.startswith(PROGRAMS)]


def installed(wheel: Path) -> list[Member]:
    """`members`, and programs for the venv's ``bin/``. Not scripts, which name an interpreter: no engine starts one.

    FlashInfer runs ninja by name when it compiles, and ninja's wheel is little else than that program.
    """
    return [member for member in entries(wheel) if member.path]


def entries(wheel: Path) -> list[Member]:
    """All files of a wheel but RECORD itself; the path is empty for what is not installed.

    Raises Failed for anything that is not plainly sound.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            scripts = {info.filename for info in infos if _script(archive, info)}
            own = _record_name(wheel, [info.filename for info in infos])
            record = _record(wheel, archive.read(own).decode())
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
        if info.filename == own:
            continue
        path = None if info.filename in scripts else _place(info.filename)
        if info.filename not in record:
            if path is None:
                continue  # scripts and data, which are never used
            raise Failed(f"{wheel.name}: {info.filename!r} is not in RECORD")
        sha256, size = record[info.filename]
        if size != info.file_size:
            raise Failed(f"{wheel.name}: {info.filename!r} has {info.file_size} bytes, RECORD says {size}")
        executable = bool(info.external_attr >> 16 & 0o111) or (path or "").startswith(PROGRAMS)
        found.append(Member(wheel, info.filename, path or "", sha256, info.file_size, executable))
    return found


def record_name(wheel: Path) -> str:
    """The name of a wheel's RECORD. Raises Failed where there is not exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        return _record_name(wheel, archive.namelist())


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


def _script(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    if _data(info.filename)[0] != "scripts":
        return False
    with archive.open(info) as file:
        return file.read(2) == b"#!"


def _data(name: str) -> tuple[str, str]:
    """(kind, name below it) of a member of a wheel's .data directory; empty for others."""
    first, _, rest = name.partition("/")
    kind, _, path = rest.partition("/")
    return (kind, path) if first.endswith(".data") else ("", "")


def _place(name: str) -> str | None:
    """Where a member goes, relative to site-packages; None for headers and data files, which no engine loads."""
    kind, path = _data(name)
    if not kind:
        return name
    if kind == "scripts":
        return PROGRAMS + path if path and "/" not in path else None
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
