"""Clients of an engine's HTTP API: no proxy of the environment, no connection that the server may be about to close."""

from __future__ import annotations

import httpx

#: Seconds for which an idle connection is used again. SGLang and uvicorn close theirs after 5 seconds
#: (SGLANG_TIMEOUT_KEEP_ALIVE, ``timeout_keep_alive``). httpx would keep them as long: a request sent then is lost.
REUSED_FOR_S = 2.0


def blocking(url: str, api_key: str | None, *, timeout_s: float) -> httpx.Client:
    return httpx.Client(
        base_url=url, headers=_headers(api_key), timeout=timeout_s, trust_env=False, limits=_limits(connections=8)
    )


def concurrent(url: str, api_key: str | None, *, connections: int, timeout_s: float | None = None) -> httpx.AsyncClient:
    """At most ``connections`` at once; without ``timeout_s`` the caller bounds each request."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        headers=_headers(api_key),
        timeout=timeout_s,
        trust_env=False,
        limits=_limits(connections),
    )


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _limits(connections: int) -> httpx.Limits:
    return httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=REUSED_FOR_S
    )
