"""The client's ear on a running apply: the journal's lines as they come, and the lease renewed meanwhile.

It has a connection of its own in a thread of its own, so that the gate may take its time on another. A cut
connection is dialled again; the host recovers by itself when the lease runs out, and the journal, read again
from where we stopped, says which of the two happened.
"""

from __future__ import annotations

import contextlib
import json
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


class Follower:
    """Follows one transaction's journal from its start to its terminal entry.

    ``give_up_s`` is how long the host may stay out of reach before we stop trying; make it longer than the lease,
    so that the host has settled by then whatever we do.
    """

    def __init__(
        self, dial: Callable[[], Transport], *, root: str, service: str, txn: str, lease_s: float, give_up_s: float
    ) -> None:
        self._dial = dial
        self._argv = ["python3", "-I", f"{root}/bin/ddtree-host", "follow", "--root", root]
        self._argv += ["--service", service, "--txn", txn]
        self._beat_s = lease_s / BEATS_PER_LEASE
        self._give_up_s = give_up_s
        self._entries: queue.Queue[Entry | Exception] = queue.Queue()
        self._seen = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"follow-{service}", daemon=True)

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
        last_contact = time.monotonic()
        while not self._stop.is_set():
            before = self._seen
            try:
                with self._dial() as transport:
                    if self._listen(transport):
                        return
            except DdtreeError as error:
                problem: DdtreeError = error
            else:
                problem = Unreachable("the connection ended while the host was applying")
            if self._seen > before:
                last_contact = time.monotonic()
            if time.monotonic() - last_contact > self._give_up_s:
                self._entries.put(problem)
                return
            self._stop.wait(RETRY_S)

    def _listen(self, transport: Transport) -> bool:
        """Read entries until the terminal one (True) or the end of the stream (False)."""
        process = transport.popen([*self._argv, "--offset", str(self._seen)], root=True)
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
                self._seen += 1
                self._entries.put(entry)
                if entry.get("step") == "end":
                    return True
        finally:
            done.set()
            process.kill()
        return False

    def _beat(self, process: Process, done: threading.Event) -> None:
        while not done.wait(self._beat_s):
            if self._stop.is_set():
                return
            with contextlib.suppress(OSError, DdtreeError):  # a dead link shows in lines(), where it is handled
                process.write(b".\n")
