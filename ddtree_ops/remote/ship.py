"""Brings a release to a host: what the store lacks, in one compressed stream, as the SSH user; root only copies.

A blob that arrived is never sent again: not by the next release, and not after a cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import Failed
from .agent import Agent
from .local import LocalTransport
from .transport import printable

#: progress(done, total), in bytes of content.
Progress = Callable[[int, int], None]
CHUNK = 1 << 18
TAR_BLOCK = 512
LEVEL = 1  # of libtorch_cpu.so it leaves 36 %; level 3 leaves 34 % for a third more CPU
RECEIVE_TIMEOUT_S = 6 * 3600
INGEST_TIMEOUT_S = 1800
INSTALL_TIMEOUT_S = 3600
# Reads the agent from the head of stdin and lets it read the stream behind it: nothing is left on the host.
RECEIVE = (
    "import sys; size, sys.argv = int(sys.argv[1]), ['ddtree-host', 'receive', '--staging', sys.argv[2]]; "
    "exec(compile(sys.stdin.buffer.read(size), 'ddtree-host', 'exec'))"
)


class ShipReport(NamedTuple):
    """``files`` in the release; ``bytes_sent`` over the link, compressed; ``bytes_total`` of the release's content."""

    files: int
    bytes_sent: int
    bytes_total: int


class Shippable(Protocol):
    """What is read of a `release.Release`."""

    @property
    def manifest(self) -> dict[str, Any]: ...
    def blob(self, sha256: str) -> Path: ...


def ship(agent: Agent, release: Shippable, progress: Progress = lambda done, total: None) -> ShipReport:
    """Uploads and installs. Harmless when repeated; raises what `Agent.call` and `Transport.run` raise."""
    files: list[dict[str, Any]] = release.manifest["files"]
    sizes: dict[str, int] = {file["sha256"]: file["size"] for file in files}
    missing: list[str] = agent.call("missing", hashes=sorted(sizes))["missing"]
    sent = 0
    if missing:
        with _staging(agent, release, missing) as staging:
            if not isinstance(agent.transport, LocalTransport):
                sent = _upload(agent, release, staging, {sha256: sizes[sha256] for sha256 in missing}, progress)
            agent.call("ingest", staging=staging, hashes=missing, timeout=INGEST_TIMEOUT_S)
    agent.call("install", manifest=release.manifest, timeout=INSTALL_TIMEOUT_S)
    return ShipReport(len(files), sent, sum(file["size"] for file in files))


@contextlib.contextmanager
def _staging(agent: Agent, release: Shippable, missing: list[str]) -> Iterator[str]:
    """The directory on the host that blobs arrive in. Over ssh it stays: what is in it is not sent again."""
    if not isinstance(agent.transport, LocalTransport):
        yield f"/var/tmp/ddtree-staging-{agent.transport.user}"
        return
    # On this machine the cache's own files are offered, by hard links: root copies and hashes them all the same.
    beside = release.blob(missing[0]).parents[2]
    with tempfile.TemporaryDirectory(prefix="staging-", dir=beside) as directory:
        for sha256 in missing:
            _link(release.blob(sha256), Path(directory) / sha256)
        yield directory


def _link(blob: Path, name: Path) -> None:
    try:
        os.link(blob, name)
    except OSError:  # a file system without hard links, or fs.protected_hardlinks on another user's cache
        shutil.copyfile(blob, name)


def _upload(agent: Agent, release: Shippable, staging: str, wanted: dict[str, int], progress: Progress) -> int:
    """Sends what is not in staging yet; returns the bytes sent."""
    staged = set(agent.call("staged", as_root=False, staging=staging)["complete"])
    # The small ones first: a cut loses the blob it hits.
    to_send = sorted((size, sha256) for sha256, size in wanted.items() if sha256 not in staged)
    if not to_send:
        return 0
    sent = 0
    source = agent.source.encode()

    def stream() -> Iterator[bytes]:
        nonlocal sent
        yield source
        for chunk in tar_stream([(sha256, size, release.blob(sha256)) for size, sha256 in to_send], progress):
            sent += len(chunk)
            yield chunk

    result = agent.transport.run(
        ["python3", "-I", "-c", RECEIVE, str(len(source)), staging], stdin=stream(), timeout=RECEIVE_TIMEOUT_S
    )
    with contextlib.suppress(ValueError):
        reply = json.loads(result.stdout)
        if result.code == 0 and reply.get("ok") is True and reply.get("received") == len(to_send):
            return sent
    said = printable(result.stdout) or printable(result.stderr) or "nothing"
    raise Failed(f"{agent.transport.name}: the upload failed (status {result.code})", hint=f"the host said: {said}")


def tar_stream(blobs: list[tuple[str, int, Path]], progress: Progress) -> Iterator[bytes]:
    """A gzip-compressed tar of (name, size, file), in constant memory. Raises Failed when a file is not that long."""
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    total, done = sum(size for _, size, _ in blobs), 0
    for name, size, path in blobs:
        info = tarfile.TarInfo(name)
        info.size = size
        yield compressor.compress(info.tobuf(tarfile.GNU_FORMAT))
        left = size
        with path.open("rb") as file:
            while chunk := file.read(min(CHUNK, left)):
                left -= len(chunk)
                done += len(chunk)
                yield compressor.compress(chunk)
                progress(done, total)
        if left:
            raise Failed(f"{path} is shorter than it was: the cache is damaged", hint="delete it and build again")
        yield compressor.compress(b"\0" * (-size % TAR_BLOCK))
    yield compressor.compress(b"\0" * 2 * TAR_BLOCK) + compressor.flush()
