"""A server's ``/metrics``, read with bounds: a server is not trusted to be short, quick or well-formed."""

from __future__ import annotations

import re
import time

import httpx

from ..errors import Failed

METRICS_LIMIT = 4 << 20
#: httpx limits each read alone: a byte every 4 s would be waited for until Ctrl-C.
FETCH_S = 10.0
#: A line of the Prometheus text format: name, labels, value.
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^\n]*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")


def parse_metrics(text: str) -> dict[str, list[float]]:
    """Values by name, one a set of labels, in the file's order; what is no finite sample is left out."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if abs(value) < 1e18:
            found.setdefault(match[1], []).append(value)
    return found


def total(samples: dict[str, list[float]], name: str) -> float | None:
    """The sum over the sets of labels; a counter is found with and without ``_total``."""
    values = samples.get(name) or samples.get(f"{name}_total")
    return sum(values) if values else None


def fetch(client: httpx.Client, limit_s: float = FETCH_S) -> str:
    """The text of ``/metrics``, bounded in size and time. Raises Failed for another status, a flood or a trickle,
    httpx.HTTPError for no answer.
    """
    body, deadline = bytearray(), time.monotonic() + limit_s
    with client.stream("GET", "/metrics") as answer:
        if answer.status_code != 200:
            raise Failed(f"status {answer.status_code}; SGLang tells them with --enable-metrics")
        for chunk in answer.iter_bytes():
            body += chunk
            if len(body) > METRICS_LIMIT:
                raise Failed(f"more than {METRICS_LIMIT} bytes")
            if time.monotonic() >= deadline:
                raise Failed(f"not whole after {limit_s:g} s")
    return body.decode(errors="replace")
