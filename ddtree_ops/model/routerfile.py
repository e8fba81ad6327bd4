"""The ``router:`` of a service as it is written: its backends and options, checked against themselves."""

from __future__ import annotations

import re
from typing import Any, cast, get_args

from ddtree_ops.model import check
from ddtree_ops.model.types import Backend, Balancing, Router
from ddtree_ops.model.validate import is_loopback
from ddtree_ops.model.yamlfile import Node

#: The name of every router's profile, which nobody writes.
ROUTER = "router"
POLICIES = get_args(Balancing)
_KEYS = (
    "backends",
    "policy",
    "metrics_port",
    "health_interval_s",
    "health_timeout_s",
    "drain_timeout_s",
    "max_unavailable",
    "bind",
    "open",
)


def parse_router(node: Node) -> Router:
    """A router's values. Raises UsageError at the key in question.

    Whether the backends exist is found once all hosts are read (`routers.check_routers`).
    """
    nodes = check.mapping(node, _KEYS, required=("backends",))
    backends = check.items(nodes["backends"], _backend)
    if not backends:
        nodes["backends"].fail("a router without backends answers nobody", allowed="[HOST/SERVICE, ...], at least one")
    named = [str(backend) for backend in backends]
    for index, item in enumerate(nodes["backends"].value):
        if named[index] in named[:index]:
            item.fail(f"{named[index]} is a backend already", allowed="each once")

    def whole(key: str, least: int, most: int, default: int) -> int:
        return check.integer(nodes[key], least, most) if key in nodes else default

    bind = check.address(nodes["bind"]) if "bind" in nodes else "127.0.0.1"
    why = check.text(nodes["open"]) if "open" in nodes else None
    if not is_loopback(bind) and why is None:
        nodes["bind"].fail(
            f"{bind} serves beyond this host, without a key", allowed="127.0.0.1; or open: the reason for it"
        )
    unavailable = whole("max_unavailable", 1, 64, 1)
    if unavailable >= len(backends) > 1:
        nodes["max_unavailable"].fail(
            f"{unavailable} of {len(backends)} backends away would leave none", allowed=f"at most {len(backends) - 1}"
        )
    policy: Any = check.choice(nodes["policy"], POLICIES) if "policy" in nodes else POLICIES[0]
    return Router(
        backends=backends,
        policy=cast(Balancing, policy),
        metrics_port=whole("metrics_port", 1024, 65_535, 29_000),
        health_interval_s=whole("health_interval_s", 1, 3600, 5),
        # a health check can take that long under a long prefill
        health_timeout_s=whole("health_timeout_s", 1, 3600, 20),
        drain_timeout_s=whole("drain_timeout_s", 1, 3500, 120),
        max_unavailable=unavailable,
        bind=bind,
        open=why,
    )


def _backend(node: Node) -> Backend:
    allowed = "HOST/SERVICE, both of this inventory"
    found = re.fullmatch(f"({check.NAME_FORM})/({check.NAME_FORM})", check.text(node, allowed=allowed), re.ASCII)
    if found is None:
        node.fail(f"not {check.describe(node)}", allowed=allowed)
    return Backend(host=found[1], service=found[2], line=node.line, path=node.path)
