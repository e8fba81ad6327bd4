"""The client's ear on a running apply: the journal's lines as they come, and the lease renewed meanwhile.

It has a connection of its own in a thread of its own, so that the gate may take its time on another. A cut
connection is dialled again; the host recovers by itself when the lease runs out, and the journal, read again
from where we stopped, says which of the two happened.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ddtree_ops.errors import DdtreeError, Unreachable
from ddtree_ops.remote.transport import Process, Transport

Entry = dict[str, Any]
BEATS_PER_LEASE = 6
RETRY_S = 1.0
STOOD_S = 3.0


class Follower:
    """Follows one transaction's journal from its start to its terminal entry.

    ``give_up_s`` is how long the host may stay out of reach before we stop trying; make it longer than the lease,
    so that the host has settled by then whatever we do.
    """

    def __init__(
        self,
        dial: Callable[[], Transport],
        *,
        root: str,
        service: str,
        supervisor: str,
        unit_dir: str,
        txn: str,
        lease_s: float,
        give_up_s: float,
        elevates: bool,
    ) -> None:
        self._dial, self._elevates = dial, elevates
        self._argv = ["python3", "-I", f"{root}/bin/ddtree-host", "follow", "--root", root, "--service", service]
        self._argv += ["--supervisor", supervisor, "--unit-dir", unit_dir, "--txn", txn]
        self._beat_s = lease_s / BEATS_PER_LEASE
        self._give_up_s = give_up_s
        self._entries: queue.Queue[Entry | Exception] = queue.Queue()
        self._seen = 0
        self._stop = threading.Event()
        self._silent = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"follow-{service}", daemon=True)

    @property
    def ended(self) -> bool:
        """Whether the terminal entry was read, taken by `next` or not: the host has decided."""
        return self._ended.is_set()

    def let_go(self) -> None:
        """Renew the lease no more; the journal is still read."""
        self._silent.set()

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def next(self) -> Entry:
        """The next journal entry; blocks. Raises Unreachable when the host stayed away for ``give_up_s``."""
        while True:
            try:  # a short wait, so that Ctrl-C reaches the main thread
                item = self._entries.get(timeout=0.5)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            return item

    def _main(self) -> None:
        try:
            self._follow()
        except Exception as error:  # also a bug in here: who waits in `next` must hear of it
            self._entries.put(error)

    def _follow(self) -> None:
        last_contact = time.monotonic()
        while not self._stop.is_set():
            before, began = self._seen, math.inf
            try:
                with self._dial() as transport:
                    began = time.monotonic()
                    if self._listen(transport):
                        return
            except DdtreeError as error:
                problem: DdtreeError = error
            else:
                problem = Unreachable("the connection ended while the host was applying")
            now = time.monotonic()
            # A load of many minutes writes nothing: contact is a stream that stood, not only one that said something.
            if self._seen > before or now - began > STOOD_S:
                last_contact = now
            if now - last_contact > self._give_up_s:
                self._entries.put(problem)
                return
            self._stop.wait(RETRY_S)

    def _listen(self, transport: Transport) -> bool:
        """Read entries until the terminal one (True) or the end of the stream (False)."""
        process = transport.popen([*self._argv, "--offset", str(self._seen)], root=self._elevates)
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(process, done), daemon=True)
        beat.start()
        try:
            for line in process.lines():
                if self._stop.is_set():
                    return True
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # sudo's or the shell's own words are not the journal
                if not isinstance(entry, dict):
                    continue
                if entry.get("step") != "follow":  # its own word "gone" is no line of the journal
                    self._seen += 1
                if entry.get("step") == "end":
                    self._ended.set()
                self._entries.put(entry)
                if self._ended.is_set():
                    return True
        finally:
            done.set()
            process.kill()
        return False

    def _beat(self, process: Process, done: threading.Event) -> None:
        while not done.wait(self._beat_s):
            if self._stop.is_set() or self._silent.is_set():
                return
            with contextlib.suppress(OSError, DdtreeError):  # a dead link shows in lines(), where it is handled
                process.write(b".\n")
