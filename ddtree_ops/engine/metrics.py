"""Counters of the engine under SGLang's metric names, in the Prometheus text format."""

from __future__ import annotations

import time
from collections import deque

import prometheus_client as prometheus

_WINDOW_STEPS = 64


class Metrics:
    """Written by the engine's thread, read by the server's. All times in seconds.

    sglang:spec_accept_length is commit length: tokens that verify steps added (accepted + 1 bonus each) over verify
    steps, of the last 64 steps. The first token of a request comes from its prefill and is counted neither above nor
    below the line. sglang:spec_accept_rate divides accepted tokens by the longest path there could have been
    (block_size - 1 a verify): SGLang's own divides by num_draft_tokens - 1, which is wrong for a tree.
    """

    def __init__(self, model_name: str, draft_depth: int) -> None:
        """draft_depth: block_size - 1, or 0 without speculation."""
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        self._depth = draft_depth
        self._window: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW_STEPS)
        self.committed = 0
        self.verified = 0
        name = model_name

        def gauge(metric: str, text: str) -> prometheus.Gauge:
            made = prometheus.Gauge(metric, text, ["model_name"], registry=self.registry)
            return made.labels(name)

        def counter(metric: str, text: str) -> prometheus.Counter:
            made = prometheus.Counter(metric, text, ["model_name"], registry=self.registry)
            return made.labels(name)

        self._accept_length = gauge("sglang:spec_accept_length", "Tokens a verify step adds, bonus included.")
        self._accept_rate = gauge("sglang:spec_accept_rate", "Accepted share of the longest possible path.")
        self._throughput = gauge("sglang:gen_throughput", "Generated tokens a second over recent steps.")
        self._running = gauge("sglang:num_running_reqs", "Requests in flight.")
        self._queued = gauge("sglang:num_queue_reqs", "Requests that wait for a place.")
        self._prompt_tokens = counter("sglang:prompt_tokens", "Prompt tokens prefilled.")
        self._cached_tokens = counter("sglang:cached_tokens", "Prompt tokens found in the prefix cache.")
        self._generated = counter("sglang:generation_tokens", "Tokens generated.")
        self._verify_calls = counter("sglang:spec_verify_calls", "Verify steps, one a request and step.")
        self._first_token = prometheus.Histogram(
            "sglang:time_to_first_token_seconds",
            "From arrival to the first token.",
            ["model_name"],
            registry=self.registry,
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
        ).labels(name)

    @property
    def average_commit_length(self) -> float:
        """Tokens added by verify steps over verify steps since the start; 0.0 before the first."""
        return self.committed / self.verified if self.verified else 0.0

    def queue(self, running: int, queued: int) -> None:
        """How many requests run and wait now."""
        self._running.set(running)
        self._queued.set(queued)
        if not running:
            self._window.clear()
            self._throughput.set(0.0)

    def prefilled(self, tokens: int, cached: int) -> None:
        """`tokens` of a prompt went through the prefill, `cached` more came from the cache."""
        self._prompt_tokens.inc(tokens)
        self._cached_tokens.inc(cached)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, from its prefill."""
        self._first_token.observe(seconds)

    def generated(self, tokens: int) -> None:
        """A request was given `tokens` tokens, those that fell behind a stop not counted."""
        self._generated.inc(tokens)

    def stepped(self, requests: int, tokens: int) -> None:
        """One decode step of `requests` requests added `tokens` tokens, those that fell behind a stop included."""
        self._window.append((time.monotonic(), requests, tokens))
        if (span := self._window[-1][0] - self._window[0][0]) > 0:
            self._throughput.set(sum(tokens for _, _, tokens in list(self._window)[1:]) / span)
        if self._depth:
            self._verify_calls.inc(requests)
            self.committed += tokens
            self.verified += requests
            steps = sum(requests for _, requests, _ in self._window)
            added = sum(tokens for _, _, tokens in self._window)
            self._accept_length.set(added / steps)
            self._accept_rate.set((added - steps) / (steps * self._depth))

    def render(self) -> bytes:
        """The text that /metrics answers."""
        return prometheus.generate_latest(self.registry)
