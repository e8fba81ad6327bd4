"""Brings a release to a host: one list of what it lacks, one compressed stream of that, one install.

The stream goes to staging as the SSH user; root takes from there what has the right hash. A cut costs what was in
flight: the connection is made again and the blob that was cut goes on at the byte where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from .. import host as host_side
from ..errors import Failed, Unreachable
from .agent import Agent
from .local import LocalTransport
from .pack import CHUNK, Pace
from .pieces import Piece, lots_of, remaining, stream
from .transport import Result, Transport

T = TypeVar("T")
#: progress(done, total), in bytes of content.
Progress = Callable[[int, int], None]
SLICE = 1 << 15
RECEIVE_TIMEOUT_S = 6 * 3600
INSTALL_TIMEOUT_S = 3600
LIST_TIMEOUT_S = 120
#: results/ship/connections.txt: one connection fills 100 Mbit/s and no more; four are twice as fast on a faster link.
CONNECTIONS = 4
SEVERAL_FROM = 64 << 20  # bytes of content: below that the dialling eats what it brings
#: So much is sent first; is the link at least that fast, ssh(1) carries the rest. On a slower one it brings nothing,
#: and a cut would cost what its buffers hold.
FIRST = 4 << 20
FAST = 4 << 20  # bytes a second, the start of the command on the host included
BULK_FROM = 16 << 20  # bytes of content
BULK_CONNECTIONS = 2
#: Waits before dialling again, in seconds; a try that brought bytes to the host starts over.
WAITS_S = (1, 2, 4, 8, 15)
# Reads the receiver from the head of stdin and lets it read the stream behind it: nothing is left on the host.
RECEIVE = """\
import os, sys, zlib
size, source = int(sys.argv[1]), b""
while len(source) < size:
    chunk = os.read(0, size - len(source))
    if not chunk:
        raise SystemExit("the stream was cut")
    source += chunk
del sys.argv[1]
exec(compile(zlib.decompress(source), "ddtree-host", "exec"))
"""


class ShipReport(NamedTuple):
    """``files`` in the release; ``bytes_sent`` over the link, compressed; ``bytes_total`` of the release's content.

    ``cuts``: how often the link was lost on the way. ``warnings``: what the host has to say of an installed release.
    """

    files: int
    bytes_sent: int
    bytes_total: int
    cuts: int = 0
    warnings: tuple[str, ...] = ()


class Shippable(Protocol):
    """What is read of a `release.Release`."""

    @property
    def manifest(self) -> dict[str, Any]: ...
    def blob(self, sha256: str) -> Path: ...


class Carrier(Protocol):
    """The part of a `Transport` that bulk needs."""

    def run(self, argv: Sequence[str], *, stdin: bytes | Iterable[bytes], timeout: float | None) -> Result: ...


class Link(Protocol):
    """A connection to one host that can be made again (`deploy.run.Session`)."""

    @property
    def agent(self) -> Agent: ...
    def reconnect(self) -> None:
        """Raises Unreachable."""

    def beside(self) -> Transport:
        """One more connection to the same host, for the caller to close. Raises Unreachable."""

    def carrier(self) -> Carrier | None:
        """A faster way there for bulk, None where there is none. Each command of it is a connection of its own."""


def ship(
    link: Link,
    release: Shippable,
    progress: Progress = lambda done, total: None,
    warn: Callable[[str], None] = lambda text: None,
    waits: Sequence[float] = WAITS_S,
) -> ShipReport:
    """Uploads and installs. Harmless when repeated; an installed release costs one round trip and no byte.

    ``warn`` is told of a lost link and of blobs that are sent again; ``waits`` are the seconds before each dialling.
    Raises what `Agent.call` does (Locked: another upload is under way), Unreachable when the host stays away, Failed
    when a blob arrives wrong twice.
    """
    return _Shipment(link, release, progress, warn, waits).run()


def staging_of(transport: Transport) -> str | None:
    """The directory on the host that blobs arrive in, kept: what is in it is not sent again. None: this machine."""
    return None if isinstance(transport, LocalTransport) else f"/var/tmp/ddtree-staging-{transport.user}"


class _Shipment:
    """One release on its way to one host."""

    def __init__(
        self, link: Link, release: Shippable, progress: Progress, warn: Callable[[str], None], waits: Sequence[float]
    ) -> None:
        self._link, self._release, self._progress, self._warn, self._waits = link, release, progress, warn, waits
        files: list[dict[str, Any]] = release.manifest["files"]
        self._sizes: dict[str, int] = {file["sha256"]: file["size"] for file in files}
        self._sent, self._cuts, self._held = 0, 0, -1
        self._tries = list(waits)
        self._by_carrier = True
        self._resent: set[str] = set()

    def run(self) -> ShipReport:
        offer = self._insist(lambda: self._call("missing", staging=self._staging, timeout=LIST_TIMEOUT_S))
        warnings = () if offer["installed"] else self._install(offer)
        files = self._release.manifest["files"]
        return ShipReport(len(files), self._sent, sum(file["size"] for file in files), self._cuts, warnings)

    def _install(self, offer: dict[str, Any]) -> tuple[str, ...]:
        """Send and install until the host has it; its warnings."""
        missing: list[str] = offer["missing"]
        there: dict[str, Any] | None = offer
        while True:
            if missing and self._staging is not None:
                wrong = self._upload(self._staging, {sha256: self._sizes[sha256] for sha256 in missing}, there)
                there = None
                if wrong:
                    self._may_send_again(wrong)
                    missing = wrong
                    continue
            with self._offered(missing) as staging:
                reply = self._insist(partial(self._call, "install", staging=staging, timeout=INSTALL_TIMEOUT_S))
            if reply["installed"] is not None:
                return tuple(map(str, reply.get("warnings", [])))
            missing = [sha256 for sha256 in (*reply["missing"], *reply["wrong"]) if sha256 in self._sizes]
            self._may_send_again(missing)

    @property
    def _staging(self) -> str | None:
        return staging_of(self._link.agent.transport)

    def _call(self, verb: str, **fields: Any) -> dict[str, Any]:
        return self._link.agent.call(verb, manifest=self._release.manifest, **fields)

    def _staged(self, staging: str) -> dict[str, Any]:
        return self._link.agent.call("staged", as_root=False, staging=staging, timeout=LIST_TIMEOUT_S)

    def _may_send_again(self, blobs: Sequence[str]) -> None:
        """Once each. Raises Failed when it was sent again already, or when the cache's own copy is the wrong one."""
        for sha256 in blobs:
            path, name = self._release.blob(sha256), self._link.agent.transport.name
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise Failed(
                        f"{name}: blob {sha256} arrived wrong because this machine's cache is damaged",
                        hint=f"delete {path} and build again",
                    )
            if sha256 in self._resent:
                raise Failed(
                    f"{name}: blob {sha256} arrived wrong, was sent again and is wrong again; nothing was installed",
                    hint=f"the copy here is right ({path}): look at that host's memory and disk",
                )
            self._resent.add(sha256)
            self._warn(f"{name}: blob {sha256} is not there or not right; sending it again")

    # the link

    def _insist(self, act: Callable[[], T]) -> T:
        """Do it, and again after a lost link. Raises Unreachable when the host stays away."""
        while True:
            try:
                return act()
            except Unreachable as error:
                self._reconnect(error)

    def _reconnect(self, lost: Unreachable) -> None:
        self._cuts += 1
        while self._tries:
            wait = self._tries.pop(0)
            self._warn(f"{lost.message}; dialling again in {wait:g} s")
            time.sleep(wait)
            try:
                return self._link.reconnect()
            except Unreachable as error:
                lost = error
        lost.hint = lost.hint or "what arrived is kept: the next deploy goes on from there"
        raise lost

    def _upload(self, staging: str, wanted: dict[str, int], there: dict[str, Any] | None) -> list[str]:
        """Send what staging does not have of ``wanted`` (``there`` says what it has); the blobs that arrived wrong."""
        while True:
            try:
                there = self._staged(staging) if there is None else there
                pieces = remaining(wanted, there["complete"], there["partial"])
                held = sum(wanted.values()) - sum(piece.size - piece.offset for piece in pieces)
                if held > self._held:
                    self._held, self._tries = held, list(self._waits)
                return self._send(staging, pieces, held, sum(wanted.values())) if pieces else []
            except Unreachable as error:
                self._reconnect(error)
                there = None

    def _send(self, staging: str, pieces: list[Piece], done: int, total: int) -> list[str]:
        """Send the pieces, over several connections where there is much; the blobs that arrived wrong."""
        wrong, first, rest = [], *self._first(pieces)
        counting = threading.Lock()

        def told(size: int) -> None:
            nonlocal done
            with counting:
                done += size
                self._progress(done, total)

        def sent(size: int) -> None:
            with counting:
                self._sent += size

        send = partial(self._send_lot, staging, told=told, sent=sent)
        carrier = None
        if first:
            before, began = self._sent, time.monotonic()
            wrong = send(self._link.agent.transport, first)
            if rest and (self._sent - before) / (time.monotonic() - began) >= FAST:
                carrier = self._link.carrier()
        if carrier is not None:
            self._by_carrier = False  # should it fail, the rest goes as it always did
            lots = lots_of(rest, BULK_CONNECTIONS)
            with ThreadPoolExecutor(len(lots)) as pool:
                told_wrong = list(pool.map(partial(send, carrier, may_store=True), lots))
            self._by_carrier = True
            return [*wrong, *itertools.chain(*told_wrong)]
        pieces = rest
        with contextlib.ExitStack() as stack:
            # Left last: when one lot fails, the other connections are closed first, which ends their sending.
            pool = stack.enter_context(ThreadPoolExecutor(CONNECTIONS))
            transports = [self._link.agent.transport]
            if sum(piece.size - piece.offset for piece in pieces) >= SEVERAL_FROM:
                with contextlib.suppress(Unreachable):  # a host that takes no more gets it over fewer
                    while len(transports) < CONNECTIONS:
                        transports.append(stack.enter_context(self._link.beside()))
            first, *lots = lots_of(pieces, len(transports))
            futures = [pool.submit(send, transport, lot) for transport, lot in zip(transports[1:], lots, strict=True)]
            wrong += send(transports[0], first)
            return [*wrong, *(sha256 for future in futures for sha256 in future.result())]

    def _first(self, pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
        """What is sent to see how fast the link is, and the rest; nothing, where nothing depends on it."""
        if not self._by_carrier or sum(piece.size - piece.offset for piece in pieces) < BULK_FROM:
            return [], pieces
        size = 0
        for count, piece in enumerate(pieces):
            if count and size + piece.size - piece.offset > 4 * FIRST:
                return pieces[:count], pieces[count:]
            size += piece.size - piece.offset
            if size >= FIRST:
                return pieces[: count + 1], pieces[count + 1 :]
        return [], pieces

    def _send_lot(
        self,
        staging: str,
        transport: Carrier,
        pieces: list[Piece],
        told: Callable[[int], None],
        sent: Callable[[int], None],
        may_store: bool = False,
    ) -> list[str]:
        source = zlib.compress(host_side.receiver().encode())

        def feed() -> Iterator[bytes]:
            pace = Pace(may_store=may_store)
            slice_size = CHUNK if may_store else SLICE  # on a slow link little counts as sent that never left
            for chunk in itertools.chain([source], stream(pieces, self._release.blob, told, pace)):
                for at in range(0, len(chunk), slice_size):
                    sent(len(chunk[at : at + slice_size]))
                    yield chunk[at : at + slice_size]

        argv = ["python3", "-I", "-c", RECEIVE, str(len(source)), staging]
        reply = self._link.agent.reply("receive", transport.run(argv, stdin=feed(), timeout=RECEIVE_TIMEOUT_S))
        return [sha256 for sha256 in reply["wrong"] if sha256 in self._sizes]

    @contextlib.contextmanager
    def _offered(self, missing: list[str]) -> Iterator[str | None]:
        """The staging directory. On this machine: the cache's own files by hard links; root copies and hashes them."""
        if self._staging is not None or not missing:
            yield self._staging
            return
        beside = self._release.blob(missing[0]).parents[2]
        with tempfile.TemporaryDirectory(prefix="staging-", dir=beside) as directory:
            for sha256 in missing:
                _link(self._release.blob(sha256), Path(directory) / sha256)
            yield directory


def _link(blob: Path, name: Path) -> None:
    try:
        os.link(blob, name)
    except OSError:  # a file system without hard links, or fs.protected_hardlinks on another user's cache
        shutil.copyfile(blob, name)
