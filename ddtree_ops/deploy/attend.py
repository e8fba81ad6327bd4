"""The client's part in one transaction: hand the sealed plan over, stay with it to its end, prove, leave the verdict.

Once the plan is handed over only the host's journal says how it ended. So nothing that goes wrong on this side (a
lost link, a gate that cannot run, Ctrl-C) is an end of its own: the host is told and the journal is read on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ddtree_ops.deploy.follow import Entry, Follower
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import DdtreeError, Failed, Interrupted, Locked, Unreachable
from ddtree_ops.exactness import Kind, Verdict
from ddtree_ops.model import Deployment
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.transport import Transport, connect

RETRY_S = 1.0
INTERRUPTED = {"kind": str(Kind.INCONCLUSIVE), "passed": False, "reasons": ["interrupted by the operator"]}


class Apart(Failed):
    """Another node of the service did not come as far, so this one goes back."""


Prove = Callable[[Transport], Verdict | None]
ForHost = Callable[[Verdict | None], dict[str, Any]]


class Link(Protocol):
    """A connection to one host's service that can be made again (`deploy.session.Session`)."""

    deployment: Deployment
    transport: Transport
    agent: Agent

    def reconnect(self) -> None:
        """Raises Unreachable."""


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Holds the first Ctrl-C back over an exchange that must not be left half done; yields whether one came.

    A second one raises KeyboardInterrupt at once. Signals reach the main thread only: elsewhere this does nothing.
    """
    came = False

    def note(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def no_verdict(code: str, message: str) -> dict[str, Any]:
    """What the host is told when there is no verdict to tell."""
    reason = {"effect": "inconclusive", "code": code, "message": message}
    return {"kind": str(Kind.INCONCLUSIVE), "passed": False, "reasons": [reason]}


_live: set[Attendance] = set()


def interrupt_all() -> None:
    """Tell every host that is being attended to go back, from another thread than the ones that attend."""
    for attendance in list(_live):
        attendance.interrupt()


class Attendance:
    """One sealed plan from its handing over to its terminal journal entry. ``entries``: the journal as it came.

    ``prove`` runs the gate over a transport; ``for_host`` makes of its verdict what the host stores. Where the host is
    one of several nodes, ``saw`` hears each entry and ``hold`` returns once none of the others has to be waited for.
    """

    def __init__(
        self,
        link: Link,
        sealed: dict[str, Any],
        ui: Ui,
        *,
        prove: Prove,
        for_host: ForHost,
        saw: Callable[[Entry], None] = lambda entry: None,
        hold: Callable[[], None] = lambda: None,
    ) -> None:
        self._link, self._sealed, self._ui = link, sealed, ui
        self._prove, self._for_host, self._saw, self._hold = prove, for_host, saw, hold
        self._follower: Follower | None = None
        self._host = link.deployment.host
        self._give_up_s = float(sealed["lease_s"]) * 2
        self._verdict: Verdict | None = None
        self._interrupted = False
        self._began = False
        self._gone = 0
        self.entries: list[Entry] = []

    def run(self) -> tuple[Entry, Verdict | None]:
        """The terminal entry and the gate's verdict, if it gave one.

        Raises Interrupted when Ctrl-C ended it, Unreachable when the host stays away, Failed (and Locked) when the
        host refuses the plan: nothing was changed then.
        """
        _live.add(self)
        try:
            return self._run()
        finally:
            _live.discard(self)

    @property
    def ended(self) -> bool:
        """Whether the host has decided, whatever is still on its way here."""
        return self._follower is not None and self._follower.ended

    def interrupt(self) -> None:
        """What Ctrl-C does, for attendances in other threads than the main one."""
        self._interrupted = True
        self._leave(INTERRUPTED)

    def abandon(self, why: str) -> None:
        """Have the host go back, from another thread: ``why`` is what it is told."""
        self._leave(no_verdict("node", why))

    def _leave(self, verdict: dict[str, Any]) -> None:
        # out of reach: its lease ends it; refused: it has a verdict, or has not begun
        with contextlib.suppress(DdtreeError):
            self._link.agent.call("verdict", txn=self._sealed["txn"], verdict=verdict)

    def _run(self) -> tuple[Entry, Verdict | None]:
        with interrupts_held() as came:
            self._hand_over()
        with Follower(
            lambda: connect(self._host),
            root=self._host.root,
            service=self._sealed["service"],
            supervisor=self._host.supervisor,
            unit_dir=self._sealed["unit_dir"],
            txn=self._sealed["txn"],
            lease_s=float(self._sealed["lease_s"]),
            give_up_s=self._give_up_s,
            elevates=self._link.agent.elevates,
        ) as follower:
            self._follower = follower
            end = self._attend(follower, interrupt=came())
        if self._interrupted and end.get("event") in ("recovered", "unchanged"):
            back = end.get("generation")
            where = "without the service, as before" if back is None else f"back on generation {back}"
            raise Interrupted(f"interrupted; {self._host.name} is {where}")
        return end, self._verdict

    def _hand_over(self) -> None:
        try:
            self._link.agent.call("apply", plan=self._sealed)
        except Unreachable as error:
            self._ui.warn(f"{error.message}; looking what the host made of the plan")

    def _attend(self, follower: Follower, *, interrupt: bool) -> Entry:
        while True:
            try:
                if interrupt:
                    interrupt = False
                    raise KeyboardInterrupt
                entry = follower.next()
                self.entries.append(entry)
                self._tell(entry)
                self._saw(entry)
                step, event = entry.get("step"), entry.get("event")
                if step == "end":
                    return entry
                if (step, event) == ("follow", "gone"):
                    if (settled := self._finish_for_the_dead()) is not None:
                        return settled
                    continue
                self._began = True
                if (step, event) == ("hold", "begin") and not self._interrupted:
                    self._go(follower)
                if (step, event) == ("gate", "begin") and not self._interrupted:
                    self._gate(follower)
            except KeyboardInterrupt:
                self._interrupt(follower)

    def _interrupt(self, follower: Follower) -> None:
        left = Interrupted(
            f"interrupted twice; {self._host.name} goes back by itself, at the latest when its lease of "
            f"{self._sealed['lease_s']} s is over",
            hint=f"see how it ended: ddtree status --host {self._host.name}",
        )
        if self._interrupted:
            raise left
        self._interrupted = True
        self._ui.warn("interrupted: the host is told to go back; waiting until it has (again Ctrl-C: not waiting)")
        self._saw({"step": "interrupted", "event": "fail", "reason": "by the operator"})
        try:
            self._send(follower, INTERRUPTED)
        except KeyboardInterrupt:
            raise left from None

    def _go(self, follower: Follower) -> None:
        """Let the host stop what runs once every other node holds too."""
        try:
            self._hold()
        except Apart as error:
            self._send(follower, no_verdict("node", error.message))
        else:
            self._deliver(follower, "go")

    def _gate(self, follower: Follower) -> None:
        """Prove what runs and tell the host. Whatever keeps the gate from a verdict is told to the host as such."""
        try:
            self._verdict = self._proven(follower)
            told = self._for_host(self._verdict)
        except Unreachable:
            if follower.ended:
                return  # decided without us; the journal's end is what counts
            raise
        except Apart as error:
            told = no_verdict("node", error.message)
        except Exception as error:  # also a bug in the gate: the host must not wait for the lease to end, nor we exit
            why = error.message if isinstance(error, DdtreeError) else f"{type(error).__name__}: {error}"
            self._ui.warn(f"the gate could not run: {why}")
            told = no_verdict("gate", f"the gate could not run: {why}")
        self._send(follower, told)

    def _proven(self, follower: Follower) -> Verdict | None:
        """The gate's verdict. One that a lost link left without evidence is not the server's: asked again."""
        while True:
            try:
                verdict = self._prove(self._link.transport)
                if verdict is None or verdict.kind is not Kind.INCONCLUSIVE or follower.ended:
                    return verdict
                self._link.transport.run(["true"], timeout=15)
                return verdict
            except Unreachable as error:
                self._reconnect(follower, error)
                if follower.ended:
                    raise
                self._ui.step("connected again; the gate starts anew")

    def _send(self, follower: Follower, verdict: dict[str, Any]) -> None:
        """Leave the verdict on the host. Refused (too late, or a second one): the journal tells what counted."""
        self._deliver(follower, "verdict", verdict=verdict)

    def _deliver(self, follower: Follower, verb: str, **fields: Any) -> None:
        while not follower.ended:
            try:
                self._link.agent.call(verb, txn=self._sealed["txn"], **fields)
                return
            except Unreachable as error:
                self._reconnect(follower, error)
            except Failed as error:
                self._ui.warn(error.message)
                follower.let_go()
                return

    def _reconnect(self, follower: Follower, lost: Unreachable) -> None:
        """Dial until it answers; raises ``lost`` when that takes too long, returns also when the journal has ended."""
        self._ui.warn(f"{lost.message}; dialling again")
        deadline = time.monotonic() + self._give_up_s
        while not follower.ended:
            try:
                self._link.reconnect()
                return
            except Unreachable:
                if time.monotonic() > deadline:
                    raise self._away(lost) from None
                time.sleep(RETRY_S)

    def _away(self, lost: Unreachable) -> Unreachable:
        lost.hint = (
            f"the host goes back by itself once its lease of {self._sealed['lease_s']} s is over; "
            f"when it answers again: ddtree status --host {self._host.name}"
        )
        return lost

    def _finish_for_the_dead(self) -> Entry | None:
        """The applier died without an end: recover, as the next deploy would. Raises NeedsHand, Failed.

        The journal then has an end and the follower reads it; where it could not be written, the host's state is the
        truth and the end is made from it.
        """
        self._gone += 1
        self._ui.warn("the host's applier is gone; recovering")
        limit = self._sealed["stop_timeout_s"] + self._sealed["health"]["timeout_s"] + self._sealed["lease_s"]
        try:
            reply = self._link.agent.call("recover", reason="its applier died", timeout=limit)
        except Locked:
            return None  # somebody else is at it already; the journal goes on
        except Unreachable as error:
            self._ui.warn(error.message)
            with contextlib.suppress(Unreachable):  # the host may have restarted; the follower has its own connection
                self._link.reconnect()
            return None
        if reply.get("result") == "nothing" and not self._began:
            raise Failed(f"{self._host.name}: the host never began with the plan; nothing was changed")
        if reply.get("result") == "nothing" and self._gone > 1:
            stands = reply.get("generation")
            stopped = any(entry.get("step") == "stop" for entry in self.entries)
            event = "confirmed" if stands == self._sealed["target"] else "recovered" if stopped else "unchanged"
            return {"step": "end", "event": event, "generation": stands, "reason": "its applier died"}
        return None

    def _tell(self, entry: Entry) -> None:
        step, event = str(entry.get("step")), str(entry.get("event"))
        if event == "fail":
            self._ui.warn(f"{step} failed: {entry.get('reason')}")
        elif text := _WORDS.get((step, event)):
            extra = f" (downtime {entry['downtime_s']:.1f} s)" if isinstance(entry.get("downtime_s"), float) else ""
            self._ui.step(text + extra)


_WORDS = {
    ("stop", "begin"): "stopping what runs",
    ("switch", "done"): "unit switched",
    ("start", "begin"): "starting",
    ("health", "begin"): "waiting until it answers with the profile's arguments",
    ("health", "done"): "healthy",
    ("recover", "begin"): "going back",
}
