"""A shape as a deployment: the inventory's base with the shape on top, its rules applied. Pure."""

from __future__ import annotations

import msgspec

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment, Workspace, resolve
from ddtree_ops.model.archs import arch_refusals
from ddtree_ops.model.types import Origin, RawProfile
from ddtree_ops.sweep.grid import Shape

PREFIX = "sweep-"


def deployment_of(
    workspace: Workspace, host: str, service: str | None, shape: Shape, most_in_flight: int
) -> Deployment:
    """The service with the shape's arguments and room for ``most_in_flight`` requests; nothing is written.

    Its profile has a name of its own, so a plan for it always starts the service, also where the same arguments run.
    Raises UsageError where the inventory does not allow the shape.
    """
    plain = resolve(workspace, host, service)
    if plain.service.lead is not None:
        raise UsageError(
            f"{plain.service_name} on {host} is a further rank of {plain.service.lead}'s",
            hint=f"--host {plain.service.lead}",
        )
    name = PREFIX + shape.name
    room = max(most_in_flight, plain.profile.max_running_requests or 0)
    values: dict[str, object] = {"algorithm": shape.algorithm, "max_running_requests": room}
    if shape.algorithm == "ddtree":
        values |= {"budget": shape.budget, "topk": shape.topk, "ladder": None}
    # Under a base the shape takes the profile's place, as --profile does; without one it goes over the profile.
    extends = None if plain.service.base else plain.service.profile
    where = {key: Origin(file="ddtree sweep", line=1, path=key) for key in (*values, "extends")}
    raw = RawProfile(name=name, file="ddtree sweep", extends=extends, values=values, origins=where)
    with_shape = msgspec.structs.replace(workspace, profiles={**workspace.profiles, name: raw})
    return resolve(with_shape, host, plain.service_name, name)


def shape_of(deployment: Deployment) -> Shape:
    """The shape of a resolved profile."""
    profile = deployment.profile
    return Shape(profile.algorithm, profile.budget, profile.topk)


def refusal(deployment: Deployment) -> str | None:
    """Why an arch rule refuses the shape on its host, rule and source named; None when none does."""
    return "; ".join(map(str, arch_refusals(deployment))) or None


def rules_of(deployment: Deployment) -> list[str]:
    """What rules changed in the profile, rule and reason named."""
    return [str(rule) for rule in deployment.profile.applied_rules]
