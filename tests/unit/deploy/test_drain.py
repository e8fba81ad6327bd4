"""A backend taken away, drained and put back, against a stub of the router's worker API and of an engine's gauges."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddtree_ops.deploy import drain
from ddtree_ops.deploy.facts import Active, Facts, Generation, Pending, State, System
from ddtree_ops.deploy.session import Session
from ddtree_ops.errors import DdtreeError, Failed, Interrupted, NeedsHand, RolledBack, Unreachable
from ddtree_ops.model import Workspace, load_workspace, resolve
from ddtree_ops.remote.transport import connect

from ..router.fleet import make_fleet
from ..sweep.place import Quiet


class Stub(ThreadingHTTPServer):
    """``workers`` by URL: healthy or not; ``running``: what the engine's gauge shows; ``asked``: what changed it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.workers: dict[str, bool] = {}
        self.running, self.health = 0, 200
        self.asked: list[str] = []
        self.on_delete: Callable[[], None] = lambda: None
        self.on_look: Callable[[], None] = lambda: None


class Answers(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_: Any) -> None:
        """Not to stderr."""

    def _json(self, told: Any, code: int = 200) -> None:
        self._send(json.dumps(told).encode(), code)

    def _send(self, body: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.server.on_look()
            text = f"sglang:num_running_reqs {self.server.running}\nsglang:num_queue_reqs 0\n"
            self._send(text.encode())
        elif self.path == "/health":
            self._send(b"", self.server.health)
        else:
            told = [{"id": url[-5:], "url": url, "is_healthy": well} for url, well in self.server.workers.items()]
            self._json({"workers": told})

    def do_DELETE(self) -> None:
        url = next(url for url in self.server.workers if url.endswith(self.path[-5:]))
        del self.server.workers[url]
        self.server.asked.append(f"- {url}")
        self.server.on_delete()
        self._json({}, 202)

    def do_POST(self) -> None:
        url = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["url"]
        self.server.workers[url] = True
        self.server.asked.append(f"+ {url}")
        self._json({}, 202)


@contextmanager
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def facts(**more: Any) -> Facts:
    """Of a service that runs."""
    return Facts(system=System(), active=Active(state="active"), **more)


class Place:
    """A fleet whose router and first engine are stubs."""

    def __init__(self, folder: Path, router: Stub, engine: Stub) -> None:
        workspace = make_fleet(folder, drain_timeout_s=1)
        for name, server in (("front", router), ("one", engine)):
            path = folder / "inventories" / f"{name}.yaml"
            (service,) = workspace.hosts[name].services.values()
            path.write_text(path.read_text().replace(f"port: {service.port}", f"port: {server.server_port}"))
        self.workspace: Workspace = load_workspace(folder)
        self.router, self.engine, self.ui = router, engine, Quiet()
        self.deployment = resolve(self.workspace, "one")
        (self.front,) = self.deployment.fronts
        routing = self.front.deployment.profile.router
        assert routing is not None
        self.one, self.two = routing.workers
        self.then: Facts | None = facts()
        router.workers |= {self.one: True, self.two: True}

    def probe(self, releases: Collection[str] = ()) -> Facts:
        """How the host is found after a failure."""
        if self.then is None:
            raise Unreachable("gone")
        return self.then

    def away(self, during: Callable[[], None] = lambda: None, seen: Facts | None = None) -> None:
        session = Session(self.deployment, connect(self.deployment.host))
        session.probe = self.probe  # type: ignore[method-assign]
        with session, drain.away(session, seen or facts(), self.ui):
            assert self.one not in self.router.workers
            during()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(drain, "POLL_S", 0.01)
    with stub() as router, stub() as engine:
        yield Place(tmp_path, router, engine)


def never() -> None:
    raise AssertionError("the service was changed")


def test_it_is_taken_away_drained_and_put_back(place: Place) -> None:
    place.engine.running = 2

    def finish_one() -> None:
        place.engine.running = max(0, place.engine.running - 1)

    place.engine.on_look = finish_one
    place.away(lambda: place.router.asked.append("changed"))
    assert place.router.asked == [f"- {place.one}", "changed", f"+ {place.one}"]
    assert place.ui.lines[0] == "front/door sends it no more requests"
    assert place.ui.lines[-1] == "front/door sends it requests again"


def test_what_does_not_finish_is_not_cut_off(place: Place) -> None:
    place.engine.running = 3
    with pytest.raises(Failed, match="3 requests still run after 1 s; nothing was changed"):
        place.away(never)
    assert place.router.workers == {place.two: True, place.one: True}


@pytest.mark.parametrize("state", ["gone", "ill"])
def test_no_more_are_taken_away_than_may_be(place: Place, state: str) -> None:
    if state == "gone":
        del place.router.workers[place.two]
    else:
        place.router.workers[place.two] = False
    with pytest.raises(Failed, match="max_unavailable is 1; nothing was changed"):
        place.away(never)
    assert place.router.asked == []


def test_of_two_clients_at_once_one_gives_way(place: Place) -> None:
    def take_the_other() -> None:
        del place.router.workers[place.two]

    place.router.on_delete = take_the_other
    with pytest.raises(Failed, match="max_unavailable"):
        place.away(never)
    assert place.router.workers == {place.one: True}


PENDING = State(confirmed=1, pending=Pending(txn="t", to=2))


@pytest.mark.parametrize(
    ("error", "then", "back"),
    [
        (RolledBack("back on generation 1"), facts(), True),
        (Failed("refused; nothing was changed"), facts(), True),
        (Interrupted("back on generation 1"), facts(), True),
        (RolledBack("back on nothing"), Facts(system=System()), False),
        (Interrupted("twice; it goes back by itself"), facts(state=PENDING), False),
        (NeedsHand("back, and it answers wrongly"), facts(), False),
        (Unreachable("gone"), None, False),
    ],
)
def test_it_comes_back_where_it_is_known_to_serve(
    place: Place, error: DdtreeError, then: Facts | None, back: bool
) -> None:
    place.then = then

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        place.away(fail)
    assert (place.one in place.router.workers) is back
    assert back or place.ui.lines[-1].startswith("! no requests come to it from front/door until")


def test_what_is_not_healthy_is_no_worker(place: Place) -> None:
    """The router would go on trying, and have it in the middle of the next change."""
    place.engine.health = 503
    place.away()
    assert place.router.asked == [f"- {place.one}"]


def test_a_router_that_does_not_run_keeps_nothing_from_being_changed(place: Place) -> None:
    place.router.shutdown()
    place.router.server_close()
    place.router.workers.pop(place.one)
    changed: list[bool] = []
    place.away(lambda: changed.append(True))
    assert changed == [True] and "does not run" in place.ui.lines[0]


def test_what_runs_on_another_port_is_taken_away_too(place: Place) -> None:
    """The inventory has a new port: what runs is known to the router by the old one."""
    moved = f"{place.one.rpartition(':')[0]}:{place.router.server_port}"
    place.router.workers[moved] = True
    generation = Generation(n=1, meta={"health": {"port": place.router.server_port}})
    place.away(seen=facts(generation=generation))
    assert set(place.router.asked[:2]) == {f"- {place.one}", f"- {moved}"}
    assert place.router.workers == {place.two: True, place.one: True}


def test_in_one_process_the_second_waits_for_the_first(place: Place) -> None:
    two = resolve(place.workspace, "two")
    began, done = threading.Event(), threading.Event()

    def second() -> None:
        with Session(two, connect(two.host)) as session:
            session.probe = place.probe  # type: ignore[method-assign]
            with drain.away(session, Facts(system=System()), Quiet()):
                done.set()

    thread = threading.Thread(target=second)

    def first() -> None:
        thread.start()
        began.set()
        assert not done.wait(0.3)

    place.away(first)
    thread.join(20)
    assert began.is_set() and done.is_set()
    assert place.router.asked == [f"- {place.one}", f"+ {place.one}", f"- {place.two}"]


def test_a_guard_would_keep_a_router_from_its_backends(place: Place) -> None:
    front = place.front.deployment
    host = msgspec.structs.replace(front.host, supervisor="systemd")
    with Session(msgspec.structs.replace(front, host=host), connect(host)) as session:
        why = session.cannot_guard(msgspec.structs.replace(front.profile, bind="0.0.0.0", open="all"))
        assert why is not None and "from its backends" in why
        assert session.cannot_guard(front.profile) is None  # nobody else reaches loopback anyway
