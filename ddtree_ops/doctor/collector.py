"""The collector as one shell script with its Python inside, and sending it to a host: one round trip."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ddtree_ops import host as host_side
from ddtree_ops.deploy.plan import model_paths
from ddtree_ops.errors import Failed
from ddtree_ops.model import Deployment
from ddtree_ops.remote.transport import Transport, printable
from ddtree_ops.units import cache_directory

PARTS = (
    *("agent/base", "agent/system", "agent/causes"),
    *(f"collector/{name}" for name in ("tools", "machine", "cards", "links", "stores", "running", "entry")),
)
LIMIT_S = 2.7
#: A reply is a few tens of KiB; more is not one of ours.
REPLY_LIMIT = 4 << 20
#: What sh and Python may take to start, in seconds, on a host that is loaded to its limits.
START_S = 30


@functools.cache
def script() -> str:
    """The whole collector: POSIX shell that finds a Python >= 3.9, and the Python as its argument."""
    head = resources.files(host_side).joinpath("collector/head.sh").read_text(encoding="utf-8")
    python = host_side.shaken(host_side.joined("collector", PARTS)).replace("'", "'\\''")
    return f'{head}exec "$python" -I -c \'\n{python}\' "$@" </dev/null\n'


def request(deployment: Deployment, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What the collector is asked of a deployment's host. Nothing in it is secret: it shows in the host's ``ps``."""
    host, profile = deployment.host, deployment.profile
    models = model_paths(deployment)
    cache = cache_directory(deployment)
    return {
        "limit_s": limit_s,
        "root": host.root,
        "service": deployment.service_name,
        "supervisor": host.supervisor,
        "port": deployment.service.port,
        "key": profile.api_key is not None,
        "models": models,
        "cuda_home": profile.env.get("CUDA_HOME", ""),
        "paths": list(dict.fromkeys([host.root, cache, "/tmp", *models])),
    }


def collect(transport: Transport, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the collector on a host, as root where the transport may be root. Raises Failed when nothing usable comes."""
    argv: Sequence[str] = ["sh", "-s", "--", json.dumps(asked)]
    result = transport.run(
        argv,
        stdin=script().encode(),
        timeout=float(asked["limit_s"]) + START_S,
        root=transport.may_root,
        limit=REPLY_LIMIT,
    )
    return parse(result.stdout, f"{transport.name}: facts", printable(result.stderr))


def parse(output: bytes, where: str, said: str = "") -> dict[str, Any]:
    """The collector's document. Raises Failed when it is none."""
    try:
        reply = json.loads(output, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict) or not isinstance(reply.get("format"), int):
        raise Failed(
            f"{where}: the collector's answer is no JSON document of its kind ({len(output)} bytes)",
            hint=f"it said: {said or printable(output[:2000]) or 'nothing'}",
        )
    if reply["format"] != 1 or isinstance(reply["format"], bool):
        raise Failed(f"{where}: facts in format {reply['format']}, this ddtree reads 1")
    return reply


def _finite(text: str) -> float | None:
    """JSON has no infinity: what would become one, or is written NaN, is not told."""
    value = float(text)
    return value if math.isfinite(value) else None
