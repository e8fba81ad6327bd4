"""A service's profile resolved: the layers merged, the host's rules applied, the whole checked. Pure.

Layers, the weakest first: built-in defaults, the base's ``extends`` chain, the base, the profile's chain, the profile.
A stronger layer's value wins; ``env``, ``exactness`` and ``checks`` are merged key by key, ``extra_args`` are appended.
``null`` takes away what weaker layers say.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from ddtree_ops.errors import UsageError
from ddtree_ops.model.archs import apply_arch_rules
from ddtree_ops.model.check import nearest
from ddtree_ops.model.nodes import group_of, require_alike
from ddtree_ops.model.routers import fronts_of, route
from ddtree_ops.model.rules import apply_rules
from ddtree_ops.model.types import Deployment, Exactness, Host, Origin, Profile, RawProfile, Service, Workspace
from ddtree_ops.model.validate import refuse_contradictions
from ddtree_ops.model.yamlfile import position

DEFAULTS: dict[str, Any] = {
    "engine": None,
    "release_base": None,
    "model": None,
    "drafter": None,
    "algorithm": "none",
    "budget": None,
    "topk": None,
    "ladder": None,
    "block_size": 8,
    "vocab_size": None,
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "attention_backend": None,
    "cuda_graph": None,
    "dtype": "bfloat16",
    "memory_fraction": None,
    "context_length": None,
    "max_running_requests": None,
    "extra_args": [],
    "env": {},
    "bind": "127.0.0.1",
    "open": None,
    "api_key": None,
    "load_timeout_s": 600,
    "stop_timeout_s": 60,
    "min_accept_length": None,
    "exactness": {
        "policy": "exact",
        "epsilon_roundings": 4,
        "concurrency": [1, 8],
        "max_new_tokens": 128,
        "prompts": None,
        "time_limit_s": 900,
        "methods": [],
    },
    "checks": {},
    "evidence": None,
}
# What the engine decides when nobody says otherwise. SGLang's tree mask is written by its Triton backend only.
ENGINE_DEFAULTS: dict[str, dict[str, Any]] = {
    "sglang": {"release_base": "sglang-0.5.17", "attention_backend": "triton", "cuda_graph": True},
    "reference": {"release_base": "reference", "attention_backend": None, "cuda_graph": False},
}
# Keys that mean something with some algorithms only: a base may set them for all, and they fall away.
_NEEDS: dict[str, tuple[str, ...]] = {
    "drafter": ("dflash", "ddtree"),
    "min_accept_length": ("dflash", "ddtree"),
    "budget": ("ddtree",),
    "topk": ("ddtree",),
    "ladder": ("ddtree",),
}


@dataclass
class Merged:
    """Values with the origin of each (``env.NAME``, ``extra_args[2]`` included); ``rank`` is the layer of each key."""

    values: dict[str, Any] = field(default_factory=lambda: {key: copy.copy(value) for key, value in DEFAULTS.items()})
    origins: dict[str, Origin] = field(default_factory=dict)
    rank: dict[str, int] = field(default_factory=dict)

    def add(self, layer: Mapping[str, Any], origins: Mapping[str, Origin], rank: int) -> None:
        """Put a stronger layer on top."""
        for key, value in layer.items():
            self.rank[key] = rank
            if key in origins:
                self.origins[key] = origins[key]
            if key in ("env", "exactness", "checks"):
                for name, part in value.items():
                    self.values[key][name] = part
                    self.origins[f"{key}.{name}"] = origins[f"{key}.{name}"]
            elif key == "extra_args" and value is not None:
                start = len(self.values[key])
                self.values[key] = self.values[key] + value
                for index in range(len(value)):
                    self.origins[f"{key}[{start + index}]"] = origins[f"{key}[{index}]"]
            else:
                self.values[key] = [] if key == "extra_args" else value


def resolve(
    workspace: Workspace, host_name: str, service_name: str | None = None, profile_override: str | None = None
) -> Deployment:
    """The deployment of a host's service. ``profile_override`` replaces the profile (the tree's shape), not the base.

    ``service_name`` may be None where the host has one service. Raises UsageError with file, line, key and what is
    allowed when a name is unknown, the profile contradicts itself or the host, or a router in front of it does.
    """
    host = _host(workspace, host_name)
    name = _service_name(host, service_name)
    made = _resolve_alone(workspace, host, name, profile_override)
    nodes = made.service.nodes
    if nodes is not None and made.service.lead is None:
        there = [workspace.hosts[rank.host] for rank in nodes.ranks[1:]]
        others = [_resolve_alone(workspace, one, name, profile_override) for one in there]
        require_alike(made, others)
        made = msgspec.structs.replace(made, others=others)
    fronts = [
        front
        for one in workspace.hosts.values()
        for other, service in one.services.items()
        if service.router is not None and service.router.names(host.name, name)
        for front in fronts_of(_resolve_alone(workspace, one, other, None), made)
    ]
    return msgspec.structs.replace(made, fronts=fronts) if fronts else made


def _resolve_alone(workspace: Workspace, host: Host, name: str, profile_override: str | None) -> Deployment:
    """The deployment without the routers in front of it."""
    service = host.services[name]
    if service.router is not None:
        if profile_override is not None:
            problem = position(host.file, service.line, f"services.{name}", "a router has no profile to replace")
            raise UsageError(problem, hint="--profile goes to its backends: --host, --service")
        behind = [
            _resolve_alone(workspace, workspace.hosts[backend.host], backend.service, None)
            for backend in service.router.backends
        ]
        return route(host, name, service, service.router, behind)
    profile_name = service.profile if profile_override is None else profile_override
    written = host if service.lead is None else workspace.hosts[service.lead]
    where = Origin(file=written.file, line=service.line, path=f"services.{name}")
    merged = Merged()
    layers = list(_layers(workspace, service, profile_name, override=profile_override is not None, where=where))
    for rank, layer in enumerate(layers, start=1):
        merged.add(layer.values, layer.origins, rank)
    # What another profile stands on says nothing of one that changes it.
    merged.values["evidence"] = layers[-1].values.get("evidence")
    _drop_what_the_algorithm_lacks(merged)
    for key in ("engine", "model"):
        if merged.values[key] is None:
            _fail(where, f"neither its base nor its profile says {key}", f"base: a profile with {key}")
    for key, value in ENGINE_DEFAULTS[merged.values["engine"]].items():
        if merged.values[key] is None:
            merged.values[key] = value
    merged.values["checks"] = {name: how for name, how in merged.values["checks"].items() if how is not None}
    applied = [*apply_rules(host, merged), *apply_arch_rules(host, merged)]
    merged.values["env"] = {name: value for name, value in merged.values["env"].items() if value is not None}
    refuse_contradictions(host, service, where, merged.values, merged.origins)
    return Deployment(
        workspace_path=workspace.path,
        host=host,
        service_name=name,
        service=service,
        profile=Profile(
            **{
                **merged.values,
                "name": profile_name,
                "base": service.base,
                "exactness": Exactness(**merged.values["exactness"]),
                "api_key": _api_key(host, merged),
                "applied_rules": applied,
                "nodes": group_of(host, service),
            }
        ),
    )


def _host(workspace: Workspace, name: str) -> Host:
    if name not in workspace.hosts:
        raise UsageError(
            f"no host '{name}' in {workspace.path}/inventories{nearest(name, workspace.hosts)}",
            hint=f"hosts here: {', '.join(workspace.hosts) or 'none'}",
        )
    return workspace.hosts[name]


def _service_name(host: Host, name: str | None) -> str:
    names = [one for one, service in host.services.items() if service.lead is None] or list(host.services)
    if name is None:
        if len(names) != 1:
            problem = "has no services" if not names else f"has {len(names)} services"
            raise UsageError(f"{host.name} {problem}: which one?", hint="--service " + " | ".join(names))
        return names[0]
    names = list(host.services)
    if name not in names:
        raise UsageError(
            f"{host.file}: no service '{name}'{nearest(name, names)}", hint=f"services there: {', '.join(names)}"
        )
    return name


def _layers(
    workspace: Workspace, service: Service, profile: str, *, override: bool, where: Origin
) -> Iterator[RawProfile]:
    if service.base is not None:
        yield from _chain(workspace, service.base, where, "base")
    if override and profile not in workspace.profiles:
        known = workspace.profiles
        raise UsageError(
            f"no profile '{profile}' in {workspace.path}/inventories/profiles{nearest(profile, known)}",
            hint=f"profiles here: {', '.join(known)}",
        )
    yield from _chain(workspace, profile, where, "profile")


def _chain(workspace: Workspace, name: str, where: Origin, key: str) -> list[RawProfile]:
    """A profile after those it extends. The loader has refused cycles and unknown names within profiles."""
    if name not in workspace.profiles:
        _fail(
            Origin(file=where.file, line=where.line, path=f"{where.path}.{key}"),
            f"no profile '{name}'{nearest(name, workspace.profiles)}",
            ", ".join(workspace.profiles),
        )
    chain = [workspace.profiles[name]]
    while (parent := chain[0].extends) is not None:
        chain.insert(0, workspace.profiles[parent])
    return chain


def _drop_what_the_algorithm_lacks(merged: Merged) -> None:
    """Let a base's drafter fall away under ``algorithm: none``; refuse one written with it or on top of it."""
    algorithm = merged.values["algorithm"]
    chosen_at = merged.rank.get("algorithm", 0)
    for key, algorithms in _NEEDS.items():
        if algorithm in algorithms or merged.values[key] is None:
            continue
        if merged.rank[key] >= chosen_at:
            said = "" if chosen_at else " (no profile names another)"
            _fail(
                merged.origins[key],
                f"given, but the algorithm is {algorithm}{said}",
                f"algorithm: {' or '.join(algorithms)}",
            )
        merged.values[key] = None


def _api_key(host: Host, merged: Merged) -> Any:
    reference = merged.values["api_key"]
    if reference is None or reference.secret is None:
        return reference
    if reference.secret not in host.secrets:
        _fail(
            merged.origins["api_key"],
            f"{host.file} has no secret '{reference.secret}'{nearest(reference.secret, host.secrets)}",
            ", ".join(host.secrets) or f"one of {host.file}'s secrets, which has none",
        )
    return host.secrets[reference.secret]


def _fail(where: Origin, problem: str, allowed: str) -> NoReturn:
    raise UsageError(position(where.file, where.line, where.path, problem, allowed))
