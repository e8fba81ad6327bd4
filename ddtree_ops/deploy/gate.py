"""The exactness gate of one host's service, reached through the transport's forwarding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.errors import Failed
from ddtree_ops.exactness import PROMPT_SET, GatePlan, Verdict, builtin_prompts, load_prompts, run_gate
from ddtree_ops.exactness.plan import check_plan
from ddtree_ops.model import Profile
from ddtree_ops.remote.transport import Transport

Progress = Callable[[str, int, int], None]


def gate_plan(
    profile: Profile, url: str, expect: Mapping[str, Any], workspace: Path | None, api_key: str | None = None
) -> GatePlan:
    """The gate's plan for a profile: what to ask, what must be shown, how long it may take."""
    exactness = profile.exactness
    own = workspace / exactness.prompts if workspace and exactness.prompts else None
    return GatePlan(
        url=url,
        algorithm=profile.algorithm,
        dtype=profile.dtype,
        policy=exactness.policy,
        epsilon_roundings=exactness.epsilon_roundings,
        min_accept_length=profile.min_accept_length,
        concurrency=tuple(exactness.concurrency),
        max_new_tokens=exactness.max_new_tokens,
        prompts=load_prompts(own) if own else builtin_prompts(),
        prompt_set=own.name if own else PROMPT_SET,
        vocab_size=profile.vocab_size,
        expect=dict(expect),
        time_limit_s=exactness.time_limit_s,
        api_key=api_key,
    )


def prove(
    transport: Transport,
    profile: Profile,
    *,
    port: int,
    expect: Mapping[str, Any],
    workspace: Path | None,
    progress: Progress | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Verdict:
    """Run the gate against the service on the host's loopback ``port``; never raises for what the server does."""
    with transport.forward(port) as url:
        plan = gate_plan(profile, url, expect, workspace, _api_key(transport, profile))
        plan = dataclasses.replace(plan, **(overrides or {}))
        return run_gate(plan, (lambda what, done, total: progress(f"gate: {what}", done, total)) if progress else None)


def preflight(transport: Transport, profile: Profile, workspace: Path | None) -> None:
    """What would keep the gate from running, found before anything is changed.

    Raises UsageError for prompts or limits that cannot give a verdict, Failed for an api key that cannot be read.
    """
    check_plan(gate_plan(profile, "http://127.0.0.1", {}, workspace, _api_key(transport, profile)))


def _api_key(transport: Transport, profile: Profile) -> str | None:
    """The service's key, read on the host as root and kept in memory only. Raises Failed when it cannot be read."""
    if profile.api_key is None or profile.api_key.file is None:
        return None
    done = transport.run(["cat", "--", profile.api_key.file], root=transport.may_root, limit=1 << 16)
    if done.code:
        raise Failed(f"{transport.name}: the api key file {profile.api_key.file} cannot be read there")
    return done.stdout.decode().strip()


def stored(verdict: Verdict, profile: Profile, *, generation: int | None, python: str) -> dict[str, Any]:
    """The verdict as the host keeps it: whether it passes under the profile's policy, and what it binds.

    A verdict says nothing about another generation or another interpreter (design.md, "On a host").
    """
    return {
        **verdict.to_json(),
        "passed": verdict.passed(profile.exactness.policy),
        "binds": {"generation": generation, "python": python},
    }
