"""A change of a service that routers send requests to: taken away from them, drained, and put back afterwards.

No request that a router accepted is lost by it: the router sends no more, and what runs may finish. How many backends
may be away is looked at before and after a worker is removed: of two changes at once at least one gives way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import httpx

from ddtree_ops import httpclients
from ddtree_ops.deploy.facts import Facts
from ddtree_ops.deploy.session import Session
from ddtree_ops.deploy.ui import Ui
from ddtree_ops.deploy.workers import NotRunning, Workers, workers_of
from ddtree_ops.errors import DdtreeError, Failed, NeedsHand
from ddtree_ops.model import Front
from ddtree_ops.remote.metrics import fetch, parse_metrics, total
from ddtree_ops.remote.transport import Transport

POLL_S = 0.25
#: A request that a router has chosen a worker for may still be on its way there.
QUIET_LOOKS = 3
#: For one health check, which can take as long under a long prefill.
HEALTH_S = 30
GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs")

_turns: dict[str, threading.BoundedSemaphore] = {}
_making = threading.Lock()


@contextlib.contextmanager
def away(session: Session, seen: Facts, ui: Ui) -> Iterator[None]:
    """Around a change of a service: its routers send it nothing and it has answered what it had.

    Where the block fails and the host stands on a proven generation that runs, it is put back; else it stays away.
    Raises Failed, with nothing changed, when too many backends would be away or requests do not finish, Unreachable
    when a router's host is.
    """
    fronts = session.deployment.fronts
    if not fronts:
        yield
        return
    with contextlib.ExitStack() as stack:
        for front in sorted(fronts, key=lambda one: one.name):
            stack.enter_context(_turn(front))
        taken: list[tuple[Front, str]] = []
        try:
            for front in fronts:
                taken += [(front, url) for url in _take(front, running_urls(front, running_port(session, seen)), ui)]
            if taken:
                _drain(session, seen, max(front.router.drain_timeout_s for front in fronts), ui)
            yield
        except BaseException as error:
            if taken and (isinstance(error, NeedsHand) or not _stands(session)):
                names = ", ".join(sorted({front.name for front, _ in taken}))
                ui.warn(f"no requests come to it from {names} until it is deployed again")
            else:
                for front, url in taken:
                    _put(front, url, ui)
            raise
        put_back(session, ui)


def put_back(session: Session, ui: Ui) -> None:
    """See that every router in front of a service that stands has it; said where it is put back or cannot be."""
    if session.deployment.fronts and _stands(session):
        for front in session.deployment.fronts:
            _put(front, front.url, ui)


def running_port(session: Session, seen: Facts) -> int:
    """The port of what runs, which the inventory may no longer have."""
    health = (seen.generation.meta.get("health") or {}) if seen.generation is not None else {}
    return int(health.get("port") or session.deployment.service.port)


def running_urls(front: Front, port: int) -> list[str]:
    """By which URLs a router may know the service: by the inventory's port, and by that of what runs."""
    return list(dict.fromkeys([front.url, f"{front.url.rpartition(':')[0]}:{port}"]))


def _take(front: Front, urls: list[str], ui: Ui) -> list[str]:
    """Have a router send nothing to the service any more; the URLs that it did send to."""
    try:
        with workers_of(front.deployment) as workers:
            mine = [one.url for one in workers.listed() if one.url in urls]
            if not mine:
                return []
            _require_enough(front, workers, urls)
            for url in mine:
                workers.remove(url)
            try:
                _require_enough(front, workers, urls)  # another client's change may have come between
            except Failed:
                for url in mine:
                    workers.add(url)
                raise
    except NotRunning:
        ui.warn(f"{front.name} does not run: no router sends requests from there")
        return []
    ui.step(f"{front.name} sends it no more requests")
    return mine


def _require_enough(front: Front, workers: Workers, urls: list[str]) -> None:
    """Raises Failed where the other backends that serve are fewer than ``max_unavailable`` allows."""
    routing = front.deployment.profile.router
    others = set(routing.workers if routing is not None else ()) - set(urls)
    serving = {one.url for one in workers.listed() if one.healthy} & others
    least = len(others) + 1 - front.router.max_unavailable
    if len(serving) < least:
        gone, most = ", ".join(sorted(others - serving)), front.router.max_unavailable
        raise Failed(
            f"{front.name}: away already: {gone}; max_unavailable is {most}; nothing was changed",
            hint=f"bring them back first (ddtree status, ddtree deploy), or raise max_unavailable of {front.name}",
        )


def _drain(session: Session, seen: Facts, limit_s: int, ui: Ui) -> None:
    """Wait until the service runs nothing. Raises Failed when requests are still running after ``limit_s``."""
    if seen.active.state != "active":
        return
    deadline, quiet, first = time.monotonic() + limit_s, 0, None
    with session.transport.forward(running_port(session, seen)) as url:
        while quiet < QUIET_LOOKS:
            busy = _busy(session.transport, url)
            if busy is None and time.monotonic() > deadline:
                ui.warn(f"it does not tell what it runs, after {limit_s} s: going on")
                return
            if busy and time.monotonic() > deadline:
                raise Failed(
                    f"{session.deployment.host.name}: {busy} requests still run after {limit_s} s; nothing was changed",
                    hint="drain_timeout_s of the router is how long they may",
                )
            if busy and first is None:
                first = busy
                ui.step(f"{busy} requests are running there; waiting until they are answered, at most {limit_s} s")
            if busy and first:
                ui.progress("draining", max(0, first - busy), first)
            quiet = quiet + 1 if busy == 0 else 0
            time.sleep(POLL_S)


def _busy(transport: Transport, url: str) -> int | None:
    """Requests that the service runs or keeps waiting; None where it does not tell. Raises Unreachable."""
    try:
        with httpclients.blocking(url, None, timeout_s=5) as client:
            told = parse_metrics(fetch(client))
    except (httpx.HTTPError, Failed):
        transport.run(["true"], timeout=15)  # Unreachable, when it is the link that is lost
        return None
    values = [total(told, name) for name in GAUGES]
    return None if None in values else int(sum(value or 0 for value in values))


def _stands(session: Session) -> bool:
    """Whether the host runs what it stands on, healthy, and no change of it is under way.

    A router that is told of a worker that is not healthy goes on trying for half an hour, into the next change.
    """
    try:
        seen = session.probe()
        if seen.state.pending is not None or seen.active.state != "active":
            return False
        with (
            session.transport.forward(running_port(session, seen)) as url,
            httpclients.blocking(url, None, timeout_s=HEALTH_S) as client,
        ):
            return client.get("/health").status_code == 200
    except (DdtreeError, httpx.HTTPError):
        return False


def _put(front: Front, url: str, ui: Ui) -> None:
    """Have a router send requests to the service again. A problem is said: the service itself is as it should be."""
    try:
        with workers_of(front.deployment) as workers:
            if any(one.url == url and one.healthy for one in workers.listed()):
                return
            workers.add(url)
        ui.step(f"{front.name} sends it requests again")
    except NotRunning:
        return  # it takes all its backends when it starts
    except DdtreeError as error:
        ui.warn(f"{front.name} does not send it requests: {error.message}; again: ddtree deploy of this service")


@contextlib.contextmanager
def _turn(front: Front) -> Iterator[None]:
    """In one process no more than ``max_unavailable`` backends of a router are away: the others wait."""
    with _making:
        turn = _turns.setdefault(front.name, threading.BoundedSemaphore(front.router.max_unavailable))
    with turn:
        yield
