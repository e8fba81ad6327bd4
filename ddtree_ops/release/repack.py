"""A stock wheel with our patches as a wheel of its own: the same bytes on any machine and day.

The local version ``+ddtree.<hash8>`` (PEP 440) says to pip, and to whoever reads ``pip show``, that it is not stock.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path

from ..errors import Failed
from .patchset import PatchSet
from .wheels import Member, entries, record_text

#: The earliest time that a zip can hold. Stored, because zlibs compress differently.
_TIME = (1980, 1, 1, 0, 0, 0)
_FILE_NAME = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[A-Za-z0-9_.!]+)-(?P<tags>[^-]+-[^-]+-[^-]+)\.whl")


def local_version(version: str, patchset: PatchSet) -> str:
    """``0.5.17+ddtree.1a2b3c4d``; the stock version where nothing is patched."""
    return f"{version}+ddtree.{patchset.hash8}" if patchset else version


def repack(wheel: Path, patchset: PatchSet, directory: Path) -> Path:
    """Writes the patched wheel into ``directory`` and returns its path.

    Raises Failed when a patch does not fit exactly or the wheel is not sound (each file is checked against RECORD).
    """
    named = _FILE_NAME.fullmatch(wheel.name)
    if named is None:
        raise Failed(f"{wheel.name}: not the name of a wheel that can be patched")
    version = local_version(named["version"], patchset)
    stem, new_stem = f"{named['name']}-{named['version']}", f"{named['name']}-{version}"
    found = entries(wheel)
    names = {member.path: member.name for member in found if member.path}
    contents = _contents(wheel, found)
    changed = patchset.apply(lambda path: contents.get(names.get(path, "")))
    contents |= {names.get(path, path): content for path, content in changed.items()}
    metadata = f"{stem}.dist-info/METADATA"
    if metadata not in contents:
        raise Failed(f"{wheel.name}: has no {metadata}")
    contents[metadata] = _with_version(wheel.name, contents[metadata], named["version"], version)
    programs = {member.name for member in found if member.executable}
    target = directory / f"{new_stem}-{named['tags']}.whl"
    record: list[tuple[str, str, int]] = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(contents.items()):
            new_name = re.sub(rf"\A{re.escape(stem)}(?=\.(?:dist-info|data)/)", new_stem, name)
            record.append((new_name, hashlib.sha256(content).hexdigest(), len(content)))
            _write(archive, new_name, content, 0o755 if name in programs else 0o644)
        own = f"{new_stem}.dist-info/RECORD"
        _write(archive, own, record_text(record, own), 0o644)
    return target


def _contents(wheel: Path, members: list[Member]) -> dict[str, bytes]:
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in members:
            try:
                found[member.name] = archive.read(member.name)
            except (zipfile.BadZipFile, OSError) as error:
                raise Failed(f"{wheel.name}: {member.name!r}: {error}") from error
            if hashlib.sha256(found[member.name]).hexdigest() != member.sha256:
                raise Failed(f"{wheel.name}: {member.name!r} does not match its hash in RECORD")
    return found


def _with_version(wheel: str, metadata: bytes, old: str, new: str) -> bytes:
    head, blank, body = metadata.partition(b"\n\n")
    head, count = re.subn(rb"(?m)^Version: %b$" % re.escape(old.encode()), b"Version: " + new.encode(), head)
    if count != 1:
        raise Failed(f"{wheel}: METADATA does not say 'Version: {old}' once")
    return head + blank + body


def _write(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.create_system = 3
    info.external_attr = (0o100000 | mode) << 16
    archive.writestr(info, content, zipfile.ZIP_STORED)
