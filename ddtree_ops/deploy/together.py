"""The nodes of one service in one transaction: none stops anything before all could, none confirms unproven.

Every node's host applies its own sealed plan, under one transaction's name. Rank 0 is attended to by the caller's
thread, where Ctrl-C arrives, each other node by a thread of its own; what goes wrong at one of them is told to all, and
all go back. Rank 0 answers, so the gate asks there; the others are told its verdict first and rank 0 last, when they
have confirmed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.deploy.attend import Apart, Attendance, Link, Prove
from ddtree_ops.deploy.follow import Entry
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Bug, DdtreeError
from ddtree_ops.exactness import Verdict

POLL_S = 0.5
#: How long a host's own reason is waited for when its applier is known to be gone.
TOLD_S = 5.0
#: (rank, the gate's verdict): what that node's host stores.
ForHosts = Callable[[int, Verdict | None], dict[str, Any]]


@dataclass(frozen=True)
class Node:
    """One node's share of a transaction: how its host is reached, its sealed plan."""

    link: Link
    sealed: dict[str, Any]

    @property
    def name(self) -> str:
        return self.link.deployment.host.name


@dataclass(frozen=True)
class Ended:
    """How it ended at one node: the journal's last word, or the error that kept it from being known."""

    entries: list[Entry]
    end: Entry
    error: DdtreeError | None = None


class _Named:
    """A Ui whose lines say which node they are of."""

    def __init__(self, ui: Ui, name: str) -> None:
        self._ui, self._name = ui, name
        self.progress = ui.progress

    def step(self, text: str) -> None:
        self._ui.step(f"{self._name}: {text}")

    def warn(self, text: str) -> None:
        self._ui.warn(f"{self._name}: {text}")


class Together:
    """One transaction over ``nodes``, rank 0 first. `run` returns when every node's host has ended or is given up."""

    def __init__(self, nodes: Sequence[Node], ui: Ui, *, prove: Prove, for_hosts: ForHosts) -> None:
        self._nodes, self._prove, self._for_hosts = nodes, prove, for_hosts
        self._moved = threading.Condition()
        self._reached: list[set[str]] = [set() for _ in nodes]
        self._ends: list[Ended | None] = [None for _ in nodes]
        self._failed: tuple[int, str] | None = None
        self._decided = False
        self._verdict: Verdict | None = None
        self._attendances = [
            Attendance(
                node.link,
                node.sealed,
                _Named(ui, node.name),
                prove=self._prover(rank),
                for_host=self._teller(rank),
                saw=self._watcher(rank),
                hold=self._holder(rank),
            )
            for rank, node in enumerate(nodes)
        ]

    def run(self) -> tuple[list[Ended], Verdict | None]:
        """How it ended at each node, and the gate's verdict if it gave one. Raises nothing for what a host does."""
        threads = [
            threading.Thread(target=self._attend, args=(rank,), name=f"node-{rank}", daemon=True)
            for rank in range(1, len(self._nodes))
        ]
        for thread in threads:
            thread.start()
        self._attend(0)
        for thread in threads:
            while thread.is_alive():  # a short wait, so that Ctrl-C reaches this thread
                thread.join(POLL_S)
        return [one for one in self._ends if one is not None], self._verdict

    def _attend(self, rank: int) -> None:
        attendance, error = self._attendances[rank], None
        last: Entry = {"event": "unknown"}
        try:
            last, _ = attendance.run()
        except DdtreeError as problem:
            error = problem
        except Exception as problem:  # a bug here must not leave the other nodes waiting for this one
            error = Bug(f"{type(problem).__name__}: {problem}")
        entries = attendance.entries
        if error is not None and entries and entries[-1].get("step") == "end":
            last = entries[-1]
        if last.get("event") != "confirmed":
            self._fail(rank, str(last.get("reason") or (error.message if error else "no reason given")))
        with self._moved:
            self._ends[rank] = Ended(entries, last, error)
            self._moved.notify_all()

    def _watcher(self, rank: int) -> Callable[[Entry], None]:
        def saw(entry: Entry) -> None:
            step, event = str(entry.get("step")), entry.get("event")
            if event == "fail" or (step, event) == ("recover", "begin"):
                self._fail(rank, f"{step}: {entry.get('reason') or 'no reason given'}")
            with self._moved:
                self._reached[rank].add(step)
                self._moved.notify_all()

        return saw

    def _fail(self, rank: int, why: str) -> None:
        """The first thing that goes wrong: told to every other node's host, whatever that one waits for."""
        with self._moved:
            if self._failed is not None:
                return
            self._failed = rank, why
            self._moved.notify_all()
        for other, attendance in enumerate(self._attendances):
            if other != rank and self._ends[other] is None:
                # a host that is out of reach must not keep the others waiting
                threading.Thread(target=attendance.abandon, args=(self._apart().message,), daemon=True).start()

    def _apart(self) -> Apart:
        assert self._failed is not None
        rank, why = self._failed
        return Apart(f"{self._nodes[rank].name}: {why}")

    def _holder(self, rank: int) -> Callable[[], None]:
        return lambda: self._until(rank, lambda: self._all_reached("hold"))

    def _all_reached(self, step: str) -> bool:
        return all(step in reached for reached in self._reached)

    def _until(self, rank: int, reached: Callable[[], bool]) -> None:
        """Wait; raises Apart when another node fails, returns also when this one's host has ended by itself."""
        with self._moved:
            while not reached() and not self._attendances[rank].ended:
                if self._failed is not None and self._failed[0] != rank:
                    raise self._apart()
                self._moved.wait(POLL_S)

    def _prover(self, rank: int) -> Prove:
        def lead(transport: Any) -> Verdict | None:
            self._until(0, lambda: self._all_reached("gate"))
            return self._prove(transport)

        def other(_: Any) -> Verdict | None:
            self._until(rank, lambda: self._decided)
            return self._verdict

        return other if rank else lead

    def _teller(self, rank: int) -> Callable[[Verdict | None], dict[str, Any]]:
        def lead(verdict: Verdict | None) -> dict[str, Any]:
            told = self._for_hosts(0, verdict)
            if told.get("passed") is True:
                self._require_waiting()
            with self._moved:
                self._verdict, self._decided = verdict, True
                self._moved.notify_all()
            if told.get("passed") is True:
                self._until(0, lambda: all(one is not None for one in self._ends[1:]))
                self._require_confirmed()
            return told

        return lead if rank == 0 else lambda verdict: self._for_hosts(rank, verdict)

    def _require_waiting(self) -> None:
        """Before anybody is told to confirm: every host's applier must be there to do so. Raises Apart, Unreachable."""
        for node in self._nodes:
            health, txn = node.sealed["health"], node.sealed["txn"]
            lock = node.link.agent.call("probe", model_paths=[], releases=[], port=int(health["port"])).get("lock")
            if not isinstance(lock, dict) or lock.get("txn") != txn or lock.get("alive") is not True:
                with self._moved:  # its own words are on the way, if it had any
                    self._moved.wait_for(lambda: self._failed is not None, timeout=TOLD_S)
                raise self._apart() if self._failed is not None else Apart(f"{node.name}: its applier is gone")

    def _require_confirmed(self) -> None:
        for node, one in zip(self._nodes[1:], self._ends[1:], strict=True):
            if one is not None and one.end.get("event") != "confirmed":
                raise Apart(f"{node.name} did not confirm: {one.end.get('reason') or 'it does not answer'}")
