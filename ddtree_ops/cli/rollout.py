"""A deploy over one host or many: look at all of them, show the plans, ask once, change them in order."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddtree_ops.cli.deploy import report, snap_after
from ddtree_ops.cli.fleet import each, everywhere, failure, finish
from ddtree_ops.cli.plan import show
from ddtree_ops.cli.screen import Screen
from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.fitting import fitting, release_ids
from ddtree_ops.deploy.nodes import planned, settled
from ddtree_ops.deploy.plan import Plan
from ddtree_ops.deploy.session import Options, Session, open_session
from ddtree_ops.errors import Interrupted
from ddtree_ops.model import Deployment, Workspace

if TYPE_CHECKING:
    from ddtree_ops.deploy.planfile import Stored


@dataclasses.dataclass(frozen=True)
class Ready:
    """One host that was looked at: its open connection, what would change, what was seen."""

    session: Session
    plan: Plan
    seen: Facts
    stored: Stored | None

    @property
    def idle(self) -> bool:
        """Nothing to change, and nobody left anything to clear up."""
        calm = all(one.unfinished is None and one.lock is None for one in self.seen.every)
        return not self.plan.changes and calm


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What ``ddtree deploy`` was told, and doing it."""

    workspace: Workspace
    options: Options
    keep_going: bool
    snapshot: bool
    yes: bool
    screen: Screen
    _committing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def run(self, wanted: Sequence[tuple[Deployment, Stored | None]]) -> int:
        """The exit code. A host that cannot be looked at stops everything before anything is touched, unless
        ``keep_going``.
        """
        deployments = [deployment for deployment, _ in wanted]
        with contextlib.ExitStack() as stack:
            kept = {_key(deployment): stored for deployment, stored in wanted}

            def look(deployment: Deployment) -> Ready:
                session = stack.enter_context(open_session(deployment))
                return self._plan(session, kept[_key(deployment)])

            ready, failed = everywhere(deployments, look)
            done = {index: failure(error) for index, error in failed.items()}
            stopped = any(isinstance(error, Interrupted) for error in failed.values())
            if done and (stopped or not self.keep_going):
                return finish(self.screen, deployments, done)
            for one in ready.values():
                self._show(one)
            busy = [one.plan for one in ready.values() if not one.idle]
            names = ", ".join(f"{plan.service} to {' and '.join(one.host for one in plan.every)}" for plan in busy)
            if busy and not self.screen.ask(f"Deploy {names}?", yes=self.yes):
                declined = (1, {"outcome": {"result": "declined"}, "summary": "declined"})
                return finish(self.screen, deployments, dict.fromkeys(range(len(deployments)), declined))
            width = min(self.workspace.max_unavailable, len(deployments))

            def act(deployment: Deployment) -> tuple[int, dict[str, Any]]:
                index = deployments.index(deployment)
                if index in done:
                    return done[index]
                screen = self.screen.named(deployment.host.name) if width > 1 else self.screen
                return self._change(ready[index], screen)

            return each(self.screen, deployments, act, stop_at_first_failure=not self.keep_going, width=width)

    def _plan(self, session: Session, stored: Stored | None) -> Ready:
        if stored is None:
            return Ready(session, *planned(session, self.options), None)
        seen = session.probe([stored.plan.release] if stored.plan.release else [])
        if seen.unfinished is None and seen.lock is None:
            self._require(session, stored, seen)
        return Ready(session, stored.plan, seen, stored)

    def _require(self, session: Session, stored: Stored, seen: Facts) -> None:
        from ddtree_ops.deploy import planfile

        planfile.require_unmoved(stored, seen)
        ids = release_ids(session.deployment)
        planfile.require_release(stored, seen, ids[fitting(session.deployment, seen.system).python])

    def _show(self, one: Ready) -> None:
        plan = one.plan
        if one.idle:
            self.screen.say(f"{plan.host}: {plan.service} generation {plan.to} runs and is proven, nothing to change")
        else:
            show(self.screen, plan, one.seen)

    def _change(self, one: Ready, screen: Screen) -> tuple[int, dict[str, Any]]:
        session, plan, seen = one.session, one.plan, one.seen
        if one.idle:
            if session.deployment.fronts:
                from ddtree_ops.deploy.drain import put_back  # a client that was killed may have left it out

                put_back(session, screen)
            return 0, {"outcome": {"result": "unchanged", "generation": plan.to}, "summary": "unchanged"}
        if settled(session, seen, screen):
            if one.stored is None:
                plan, seen = planned(session, self.options)
                show(screen, plan, seen)
            else:
                seen = session.probe([plan.release] if plan.release else [])
        if one.stored is not None:
            self._require(session, one.stored, seen)
        from ddtree_ops.deploy import run  # the gate, the engine's client: not for a deploy of what runs already

        outcome = run.deploy(session, plan, seen, screen)
        report(screen, outcome)
        if self.snapshot and outcome.result == "confirmed":
            with self._committing:
                snap_after(screen, session)
        return 0, {"outcome": outcome.as_json(), "summary": f"generation {outcome.generation} {outcome.result}"}


def _key(deployment: Deployment) -> tuple[str, str]:
    return deployment.host.name, deployment.service_name
