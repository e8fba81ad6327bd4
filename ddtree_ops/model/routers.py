"""Routers and what they stand in front of: checked over all hosts, resolved to worker URLs. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NoReturn

from ddtree_ops.errors import UsageError
from ddtree_ops.model.check import nearest
from ddtree_ops.model.nodes import require_answers
from ddtree_ops.model.routerfile import ROUTER
from ddtree_ops.model.types import Backend, Deployment, Front, Host, Profile, Router, Routing, Service
from ddtree_ops.model.validate import is_loopback
from ddtree_ops.model.yamlfile import position

RELEASE_BASE = "router-0.3.2"
#: Until it answers: it starts in a second, and then looks for its backends for as long.
LOAD_S = 120
#: For the process to end after its last request.
STOP_SPARE_S = 10


def check_routers(hosts: Mapping[str, Host]) -> None:
    """Raise UsageError, with file and key, for a backend that is not there or is a router itself."""
    for host in hosts.values():
        for name, service in host.services.items():
            for backend in service.router.backends if service.router is not None else ():
                _check(hosts, host, name, backend)


def _check(hosts: Mapping[str, Host], host: Host, name: str, backend: Backend) -> None:
    if backend.host not in hosts:
        _fail(host, backend, f"no host '{backend.host}'{nearest(backend.host, hosts)}", ", ".join(hosts))
    services = hosts[backend.host].services
    engines = [one for one, service in services.items() if service.router is None]
    if backend.service not in services:
        problem = f"{backend.host} has no service '{backend.service}'{nearest(backend.service, engines)}"
        _fail(host, backend, problem, ", ".join(engines) or "a host with an engine")
    require_answers(host, backend.service, services[backend.service], backend)
    if (backend.host, backend.service) == (host.name, name):
        _fail(host, backend, "a router cannot be its own backend", "engines")
    if services[backend.service].router is not None:
        _fail(host, backend, f"{backend} is a router itself, and routers in a row may go round", "engines")


def route(host: Host, name: str, service: Service, router: Router, behind: Sequence[Deployment]) -> Deployment:
    """The deployment of a router in front of the resolved backends ``behind``, in the order of ``router.backends``.

    Raises UsageError for backends that are not of one model, ask for
    a key, or that the router cannot reach.
    """
    urls: list[str] = []
    first = behind[0].profile
    for backend, there in zip(router.backends, behind, strict=True):
        url = worker_url(host, there)
        if url is None:
            problem = f"{backend} binds {there.profile.bind} on {there.host.name}, which {host.name} cannot reach"
            _fail(host, backend, problem, "a backend on its own host; or bind: and open: in its profile")
        if url in urls:
            _fail(host, backend, f"{backend} is {url}, as {router.backends[urls.index(url)]} is", "each backend once")
        if there.profile.api_key is not None:
            problem = f"{backend} asks for a key, which the router takes only in its arguments, for all to read"
            _fail(host, backend, problem, "a backend without api_key")
        for what, mine, theirs in _differences(first, there.profile):
            problem = f"{backend} has {what} {theirs}, {router.backends[0]} has {mine}"
            _fail(host, backend, problem, "backends of one model")
        urls.append(url)
    routing = Routing(
        workers=urls,
        policy=router.policy,
        metrics_port=router.metrics_port,
        health_interval_s=router.health_interval_s,
        health_timeout_s=router.health_timeout_s,
        drain_timeout_s=router.drain_timeout_s,
    )
    return Deployment(
        workspace_path=behind[0].workspace_path,
        host=host,
        service_name=name,
        service=service,
        profile=_profile(router, routing, first),
    )


def _profile(router: Router, routing: Routing, first: Profile) -> Profile:
    """What a router's unit and gate need. How its backends decode is not in it: that may change behind a router."""
    return Profile(
        name=ROUTER,
        base=None,
        engine="router",
        release_base=RELEASE_BASE,
        model=PurePosixPath(first.model).name,
        drafter=None,
        algorithm="none",
        budget=None,
        topk=None,
        block_size=first.block_size,
        vocab_size=first.vocab_size,
        tp=1,
        pp=1,
        ep=1,
        attention_backend=None,
        cuda_graph=False,
        dtype=first.dtype,
        memory_fraction=None,
        context_length=None,
        max_running_requests=None,
        extra_args=[],
        env={},
        bind=router.bind,
        open=router.open,
        api_key=None,
        load_timeout_s=LOAD_S,
        stop_timeout_s=router.drain_timeout_s + STOP_SPARE_S,
        min_accept_length=None,
        exactness=first.exactness,
        applied_rules=[],
        router=routing,
    )


def fronts_of(front: Deployment, backend: Deployment) -> list[Front]:
    """The router in front of a backend, as the backend's own deployment has it; none where it is not before it."""
    router, routing = front.service.router, front.profile.router
    if router is None or routing is None:
        return []
    known = [(one.host, one.service) for one in router.backends]
    me = (backend.host.name, backend.service_name)
    return [Front(deployment=front, router=router, url=routing.workers[known.index(me)])] if me in known else []


def _differences(first: Profile, other: Profile) -> list[tuple[str, object, object]]:
    """(what, of the first, of the other) where the two cannot be one model."""
    pairs = [
        ("model", PurePosixPath(first.model).name, PurePosixPath(other.model).name),
        ("dtype", first.dtype, other.dtype),
        ("vocab_size", first.vocab_size, other.vocab_size),
    ]
    return [(what, mine, theirs) for what, mine, theirs in pairs if mine != theirs]


def worker_url(router: Host, backend: Deployment) -> str | None:
    """The base URL by which a router on one host reaches a backend; None where the backend binds its loopback only."""
    bind, there = backend.profile.bind, backend.host
    same = router.name == there.name or router.transport == there.transport == "local"
    everywhere = bind in ("0.0.0.0", "::")
    if same:
        address = ("::1" if ":" in bind else "127.0.0.1") if everywhere or is_loopback(bind) else bind
    elif is_loopback(bind):
        return None
    else:
        address = there.address if everywhere else bind
    return f"http://{_bracketed(address)}:{backend.service.port}"


def _bracketed(address: str) -> str:
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address


def _fail(host: Host, backend: Backend, problem: str, allowed: str) -> NoReturn:
    raise UsageError(position(host.file, backend.line, backend.path, problem, allowed))
