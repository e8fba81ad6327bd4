"""The exactness gate of one host's service, reached through the transport's forwarding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.deploy.facts import System
from ddtree_ops.deploy.workers import workers_at
from ddtree_ops.errors import Failed
from ddtree_ops.exactness import PROMPT_SET, GatePlan, Prompt, Verdict, builtin_prompts, load_prompts, run_gate
from ddtree_ops.exactness.golden import Recording
from ddtree_ops.exactness.plan import ROUTED, Tree, check_plan
from ddtree_ops.model import Profile
from ddtree_ops.remote.transport import Transport

Progress = Callable[[str, int, int], None]


def gate_plan(
    profile: Profile, url: str, expect: Mapping[str, Any], workspace: Path | None, api_key: str | None = None
) -> GatePlan:
    """The gate's plan for a profile: what to ask, what must be shown, how long it may take."""
    exactness = profile.exactness
    prompts, prompt_set = gate_prompts(profile, workspace)
    return GatePlan(
        url=url,
        algorithm=profile.algorithm if profile.router is None else ROUTED,
        dtype=profile.dtype,
        policy=exactness.policy,
        epsilon_roundings=exactness.epsilon_roundings,
        min_accept_length=profile.min_accept_length,
        concurrency=tuple(exactness.concurrency),
        max_new_tokens=exactness.max_new_tokens,
        prompts=prompts,
        prompt_set=prompt_set,
        vocab_size=profile.vocab_size,
        tree=tree_of(profile),
        expect=dict(expect),
        time_limit_s=exactness.time_limit_s,
        methods=tuple(exactness.methods),
        api_key=api_key,
    )


def tree_of(profile: Profile, drafter: str = "") -> Tree | None:
    """What the profile drafts, None without speculation. ``drafter`` names its weights."""
    if profile.algorithm == "none":
        return None
    return Tree(
        block_size=profile.block_size, budget=profile.budget, topk=profile.topk, ladder=profile.ladder, drafter=drafter
    )


def gate_prompts(profile: Profile, workspace: Path | None) -> tuple[list[Prompt], str]:
    """The profile's prompts and the set's name: its own file of the workspace, or the packaged set."""
    own = workspace / profile.exactness.prompts if workspace and profile.exactness.prompts else None
    return (load_prompts(own), own.name) if own else (builtin_prompts(), PROMPT_SET)


def prove(
    transport: Transport,
    profile: Profile,
    *,
    port: int,
    expect: Mapping[str, Any],
    workspace: Path | None,
    progress: Progress | None = None,
    overrides: Mapping[str, Any] | None = None,
    recording: Recording | None = None,
) -> Verdict:
    """Run the gate against the service on the host's loopback ``port``; never raises for what the server does.

    Raises Failed for a router that does not find all its backends healthy.

    ``overrides``: fields of the plan that an operator asked for; ``recording`` collects the outputs.
    """
    with transport.forward(port) as url:
        if profile.router is not None:
            with workers_at(transport.name, url) as workers:
                workers.await_healthy(profile.router.workers, profile.load_timeout_s)
        plan = gate_plan(profile, url, expect, workspace, api_key(transport, profile))
        plan = dataclasses.replace(plan, **(overrides or {}))
        tell = (lambda what, done, total: progress(f"gate: {what}", done, total)) if progress else None
        return run_gate(plan, tell, recording)


def preflight(transport: Transport, profile: Profile, workspace: Path | None) -> None:
    """What would keep the gate from running, found before anything is changed.

    Raises UsageError for prompts or limits that cannot give a verdict, Failed for an api key that cannot be read.
    """
    check_plan(gate_plan(profile, "http://127.0.0.1", {}, workspace, api_key(transport, profile)))


def api_key(transport: Transport, profile: Profile) -> str | None:
    """The service's key, read on the host as root and kept in memory only. Raises Failed when it cannot be read."""
    if profile.api_key is None or profile.api_key.file is None:
        return None
    done = transport.run(["cat", "--", profile.api_key.file], root=transport.may_root, limit=1 << 16)
    if done.code:
        raise Failed(f"{transport.name}: the api key file {profile.api_key.file} cannot be read there")
    return done.stdout.decode().strip()


def stored(verdict: Verdict, profile: Profile, *, generation: int | None, system: System) -> dict[str, Any]:
    """The verdict as the host keeps it: whether it passes under the profile's policy, and what it binds.

    A verdict says nothing about another generation, interpreter or driver (design.md, "On a host").
    """
    return {
        **verdict.to_json(),
        "passed": verdict.passed(profile.exactness.policy),
        "binds": {"generation": generation, "python": system.python, "driver": system.driver},
    }
