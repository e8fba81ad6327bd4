"""The journal, and what is installed under a service's name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from .base import JSON, TEXT_CAP, HostError, fsync_dir, read_bytes, remove, write_file, write_link

if TYPE_CHECKING:
    from typing import Any


class Journal:
    """Fsynced JSON lines. One writer, the holder of the service's flock; anybody may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, txn: str | None = None) -> list[JSON]:
        """All whole entries, or those of one transaction; a torn or damaged line is left out."""
        found = []
        for line in (read_bytes(self.path, 64 << 20, tail=True) or b"").split(b"\n"):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and (txn is None or entry.get("txn") == txn):
                    found.append(entry)
        return found

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line and fsync it. A torn last line, left by a crash, is cut off first."""
        fresh = not self.path.exists()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(fd).st_size
            tail = os.pread(fd, TEXT_CAP, max(0, size - TEXT_CAP))
            if tail and not tail.endswith(b"\n"):
                size -= len(tail) - (tail.rfind(b"\n") + 1)
                os.ftruncate(fd, size)
            line = json.dumps({"t": round(time.time(), 3), **entry}).encode() + b"\n"
            try:
                if os.write(fd, line) != len(line):
                    raise OSError(errno.ENOSPC, "short write", str(self.path))
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        if fresh:
            fsync_dir(self.path.parent)


class Form:
    """All that a service's name means on disk. ``kind``: none, file (``data`` = bytes), link (``data`` = target).

    ``links`` are the symlinks that enable or alias the unit: path relative to unit_dir -> target.
    """

    def __init__(
        self,
        kind: str = "none",
        data: bytes = b"",
        mode: int = 0o644,
        owner: tuple[int, int] | None = None,
        dropins: Mapping[str, bytes] = MappingProxyType({}),
        links: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.kind, self.data, self.mode, self.owner = kind, data, mode, owner
        self.dropins, self.links = dropins, links

    @property
    def masked(self) -> bool:
        return self.kind == "link" and self.data == b"/dev/null"

    def differs(self, now: Form) -> list[str]:
        """In words, how ``now`` differs from this form."""
        found = []
        if (self.kind, self.data) != (now.kind, now.data):
            if now.masked:
                found.append("the unit is masked")
            else:
                found.append("the unit is gone" if now.kind == "none" else "the unit was edited")
        for name in sorted({*self.dropins, *now.dropins}):
            if self.dropins.get(name) != now.dropins.get(name):
                word = "added" if name not in self.dropins else "removed" if name not in now.dropins else "edited"
                found.append(f"drop-in {name} was {word}")
        if set(self.links) != set(now.links):
            found.append(f"its links are {sorted(now.links)}, not {sorted(self.links)}")
        return found


def read_entry(path: Path) -> Form:
    """A file or link as a Form without drop-ins and links."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return Form()
    owner = (status.st_uid, status.st_gid)
    if stat.S_ISLNK(status.st_mode):
        return Form("link", os.fsencode(path.readlink()), owner=owner)
    if not stat.S_ISREG(status.st_mode) or status.st_size > TEXT_CAP:
        raise HostError("refused", f"{path} is not a regular file of at most {TEXT_CAP} bytes")
    return Form("file", path.read_bytes(), stat.S_IMODE(status.st_mode), owner)


def put_entry(path: Path, form: Form) -> None:
    """Make ``path`` what the form says; writes nothing when it is so already (a full disk does not matter then)."""
    now = read_entry(path)
    if (now.kind, now.data) == (form.kind, form.data) and (form.kind != "file" or now.mode == form.mode):
        return
    if form.kind == "none":
        remove(path)
    elif form.kind == "link":
        write_link(path, os.fsdecode(form.data))
    else:
        write_file(path, form.data, form.mode, form.owner if os.geteuid() == 0 else None)


def install_links(unit_path: Path, text: str) -> dict[str, str]:
    """What ``systemctl enable`` would make of the unit's [Install] (WantedBy, RequiredBy)."""
    links, section = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip()
        key, _, value = line.partition("=")
        kind = {"WantedBy": "wants", "RequiredBy": "requires"}.get(key.strip())
        if section == "[Install]" and kind:
            links.update({f"{target}.{kind}/{unit_path.name}": str(unit_path) for target in value.split()})
    return links


def settings(text: str, key: str) -> list[str]:
    """Values of a unit's ``key=`` lines."""
    return [line.partition("=")[2].strip() for line in text.splitlines() if line.partition("=")[0].strip() == key]
