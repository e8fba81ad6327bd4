"""A whole sweep on one host's service: start after start until the strategy wants no more, every step journaled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddtree_ops import __version__
from ddtree_ops.deploy.aftermath import by_hand, prove_again
from ddtree_ops.deploy.nodes import side_by_side
from ddtree_ops.deploy.session import Session, author, open_session, restore_limit_s, settle
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.errors import Failed, Locked, NeedsHand, UsageError
from ddtree_ops.exactness import Kind
from ddtree_ops.model import Deployment, Workspace
from ddtree_ops.sweep.ceiling import ceilings
from ddtree_ops.sweep.grid import Cell, Load, Shape, Start
from ddtree_ops.sweep.hold import Hold, Rules
from ddtree_ops.sweep.profiles import deployment_of, refusal
from ddtree_ops.sweep.records import FORMAT, Attempt, Client, Ended, Journal, Measured, Run, cells
from ddtree_ops.sweep.strategy import Strategy, outstanding, remaining_s
from ddtree_ops.sweep.workload import PromptSet

#: A reference cell that moved by more than this over the run is reported.
DRIFT_BOUND = 0.05


@dataclass(frozen=True)
class Sweep:
    """What to do. ``shapes``: the reference first. ``time_limit_s``: no cell begins after it. ``rehearse``: ask for the
    client's ceiling first (a run without it claims no crossover).
    """

    workspace: Workspace
    host: str
    service: str | None
    shapes: Sequence[Shape]
    loads: Sequence[Load]
    sets: Mapping[str, PromptSet]
    strategy: Strategy
    seed: int
    command: str
    pass_limit_s: float
    time_limit_s: float | None = None
    rehearse: bool = True

    @property
    def most_in_flight(self) -> int:
        """The largest C of any cell."""
        return max(load.concurrency for load in self.loads)

    def deployment(self, shape: Shape) -> Deployment:
        """The service with that shape. Raises UsageError."""
        return deployment_of(self.workspace, self.host, self.service, shape, self.most_in_flight)


@dataclass(frozen=True)
class Progress:
    """For whoever watches: the starts wanted so far, what is done, about how many seconds are left (None: unknown)."""

    starts: list[Start]
    done: dict[Cell, Measured]
    running: Cell | None
    left_s: float | None


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Outcome:
    """How it ended: what has a record, and how many cells have none yet (the time was over)."""

    done: dict[Cell, Measured]
    left: int


def run(sweep: Sweep, journal: Journal, ui: Ui, watch: Watch) -> Outcome:
    """Do what is left of the sweep. The host ends on the generation on which it began, whatever happens.

    Raises what stops the whole sweep: UsageError, Locked, Unreachable, Failed before a change, NeedsHand, Interrupted.
    """
    stop_at = None if sweep.time_limit_s is None else time.monotonic() + sweep.time_limit_s
    _begin(sweep, journal, ui)
    touched = False
    while True:
        done = cells(journal.records)
        wanted = sweep.strategy(done)
        left = outstanding(wanted, done)
        rules = _rules(sweep, journal, watch, wanted, stop_at)
        if not left or rules.over:
            break
        deployment = sweep.deployment(left[0].shape)
        if (why := refusal(deployment)) is not None:
            for cell in left[0].cells:
                record = Measured(t=time.time(), cell=cell, status="refused", reason=why)
                journal.append(record)
                rules.done(record)
            continue
        ui.step(f"-- {left[0].shape.name}, start {left[0].number}: {len(left[0].cells)} cells --")
        before = len(journal.of(Measured))
        with open_session(deployment) as session:
            _settle(session, journal, ui)
            touched = True
            Hold(session, left[0], journal, rules, ui).run()
        if len(journal.of(Measured)) == before and not rules.over:
            raise Failed(
                f"{sweep.host}: the start of {left[0].shape.name} ended from outside, no cell was measured",
                hint="look who else works there (ddtree history), then run the same sweep again: it goes on",
            )
    if touched:
        _stands(sweep, journal, ui)
    done = cells(journal.records)
    return Outcome(done, sum(len(start.cells) for start in outstanding(sweep.strategy(done), done)))


def _rules(sweep: Sweep, journal: Journal, watch: Watch, wanted: list[Start], stop_at: float | None) -> Rules:
    def tell(running: Cell | None) -> None:
        done = cells(journal.records)
        watch(Progress(wanted, done, running, remaining_s(wanted, done, start_overheads(journal))))

    return Rules(sweep.sets, sweep.pass_limit_s, stop_at, begun=tell, done=lambda _: tell(None))


def start_overheads(journal: Journal) -> list[float]:
    """What each ended start took beside its cells, in seconds: stop, load, gate, the way back."""
    spent: dict[str | None, float] = {}
    for record in journal.of(Measured):
        spent[record.txn] = spent.get(record.txn, 0.0) + record.wall_s
    return [max(0.0, end.seconds - spent.get(end.txn, 0.0)) for end in journal.of(Ended)]


def _begin(sweep: Sweep, journal: Journal, ui: Ui) -> None:
    """The header of a new run, or what an earlier one says checked; the client's own ceiling."""
    earlier = journal.of(Run)
    sets = {name: chosen.facts() for name, chosen in sweep.sets.items()}
    if earlier:
        for name, facts in sets.items():
            if earlier[0].sets.get(name, facts) != facts:
                raise UsageError(
                    f"{journal.path}: the prompt set {name} is another one than when the run began",
                    hint="name another --run",
                )
    else:
        deployment = sweep.deployment(sweep.shapes[0])
        cards = deployment.host.gpus
        journal.append(
            Run(
                format=FORMAT,
                t=time.time(),
                host=sweep.host,
                service=deployment.service_name,
                command=sweep.command,
                seed=sweep.seed,
                reference=sweep.shapes[0],
                drift_bound=DRIFT_BOUND,
                loads=[load.name for load in sweep.loads],
                shapes=list(sweep.shapes),
                sets=sets,
                hardware={"gpus": cards.count, "name": cards.name, "arch": cards.arch, "link": cards.interconnect},
                version=__version__,
            )
        )
    if sweep.rehearse and not journal.of(Client):
        longest = max(load.max_tokens for load in sweep.loads)
        found = ceilings([load.concurrency for load in sweep.loads], longest)
        journal.append(Client(t=time.time(), ceilings=found))
        for concurrency, (tokens, chunks) in found.items():
            ui.step(f"the client's own ceiling at C={concurrency}: {tokens:.0f} tokens/s, {chunks:.0f} chunks/s")


def _settle(session: Session, journal: Journal, ui: Ui) -> None:
    """Before a start: end what an earlier process of this same run left, or what a dead deploy did. Raises Locked."""
    side_by_side(session.every, lambda one: _settle_one(one, journal, ui))


def _settle_one(session: Session, journal: Journal, ui: Ui) -> None:
    seen = session.probe()
    mine = {attempt.txn for attempt in journal.of(Attempt)}
    if seen.lock is not None and seen.lock.alive and seen.lock.txn in mine:
        ui.step("an earlier process of this sweep was killed; its start is ended first")
        by = author(session.deployment.workspace_path)
        limit = restore_limit_s(session.deployment)
        session.agent.call(
            "unlock",
            reason="its sweep was killed, another process goes on with it",
            wait_s=min(limit, 3600),
            who=by["who"],
            client=by["client"],
            timeout=limit + 30,
        )
        seen = session.probe()
    try:
        if settle(session, seen, ui):
            session.probe()
    except Locked as locked:
        locked.hint = f"{locked.hint}; then run the same sweep again, it goes on"
        raise


def _stands(sweep: Sweep, journal: Journal, ui: Ui) -> None:
    """What is back is asked once more whether it answers exactly. Raises NeedsHand when it does not."""
    ended = journal.of(Ended)
    if not ended or ended[-1].generation is None:
        return
    deployment = sweep.deployment(sweep.shapes[0])
    with open_session(deployment) as session:
        if session.probe().active.state != "active":
            return  # it was stopped before the sweep as well
        again = prove_again(session, ended[-1].generation, ui)
    if again is not None and again[0] is Kind.FAIL:
        raise NeedsHand(
            f"{sweep.host}: back on generation {ended[-1].generation}; {again[1]}",
            hint="\n".join(by_hand(deployment)),
        )
