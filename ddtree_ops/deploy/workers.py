"""A router's workers, through its own API (sglang-router 0.3.2): which it has, taking one away, putting one back.

It answers 202 and does the work later, so each call here waits until the list shows it. Removing a worker ends the
choosing of it; requests that it is answering already go on to their end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from ddtree_ops import httpclients
from ddtree_ops.errors import Failed
from ddtree_ops.model import Deployment
from ddtree_ops.remote.transport import connect

POLL_S = 0.1
#: For the router to do what it has said it would; a worker that is to be healthy has to be asked first.
SETTLE_S = 30.0
ANSWER_S = 10.0


@dataclass(frozen=True)
class Worker:
    """One of the router's workers, as it tells."""

    id: str
    url: str
    healthy: bool


class NotRunning(Failed):
    """Nobody listens on the router's port, on a host that answers: there is no router to ask."""


class Workers:
    """The worker API at a router's base URL. Methods raise NotRunning, and Failed for any other answer than theirs."""

    def __init__(self, name: str, client: httpx.Client) -> None:
        self._name, self._client = name, client

    def listed(self) -> list[Worker]:
        """All of them, the unhealthy ones too."""
        told = self._ask("GET", "/workers").get("workers")
        if not isinstance(told, list):
            raise Failed(f"{self._name}: the router does not list its workers")
        return [
            Worker(str(one.get("id")), str(one.get("url")), one.get("is_healthy") is True)
            for one in told
            if isinstance(one, dict)
        ]

    def remove(self, url: str) -> bool:
        """Send no more requests to a worker; False where it is none."""
        mine = [one for one in self.listed() if one.url == url]
        for one in mine:
            self._ask("DELETE", f"/workers/{one.id}")
        self._until(lambda listed: all(one.url != url for one in listed), f"{url} is still a worker")
        return bool(mine)

    def add(self, url: str) -> None:
        """Send requests to a worker (again), once the router finds it healthy. Harmless when it does already."""
        self._ask("POST", "/workers", {"url": url})
        self._until(lambda listed: any(one.url == url and one.healthy for one in listed), f"{url} is no healthy worker")

    def await_healthy(self, urls: list[str], limit_s: float) -> None:
        """Until the router finds all of them healthy."""
        self._until(
            lambda listed: set(urls) <= {one.url for one in listed if one.healthy},
            f"not all of {', '.join(urls)} are healthy workers",
            limit_s,
        )

    def _until(self, done: Any, problem: str, limit_s: float = SETTLE_S) -> None:
        deadline = time.monotonic() + limit_s
        while not done(self.listed()):
            if time.monotonic() > deadline:
                raise Failed(f"{self._name}: {problem} after {limit_s:.0f} s")
            time.sleep(POLL_S)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, json=body)
            told = answer.json()
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
            raise NotRunning(f"{self._name}: {error}") from error
        except (httpx.HTTPError, ValueError) as error:
            raise Failed(f"{self._name}: the router does not answer {path}: {error}") from error
        if answer.status_code not in (200, 202) or not isinstance(told, dict):
            raise Failed(
                f"{self._name}: the router answered {method} {path} with {answer.status_code}: {str(told)[:300]}"
            )
        return told


@contextlib.contextmanager
def workers_at(name: str, url: str) -> Iterator[Workers]:
    """The worker API at a base URL that is reached from here."""
    with httpclients.blocking(url, None, timeout_s=ANSWER_S) as client:
        yield Workers(name, client)


@contextlib.contextmanager
def workers_of(router: Deployment) -> Iterator[Workers]:
    """The worker API of a router, over a connection of its own to the router's host. Raises Unreachable."""
    name = f"{router.host.name}/{router.service_name}"
    with connect(router.host) as transport, transport.forward(router.service.port) as url, workers_at(name, url) as api:
        yield api
