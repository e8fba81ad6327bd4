"""One service over several hosts: as it is written, checked over all hosts, and what each of its ranks runs with. Pure.

It is written once, at the host of rank 0, which answers requests. On the hosts of the other ranks a service of the same
name is added, so that ports, GPUs and names are looked at there as for any other.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from ddtree_ops.errors import UsageError
from ddtree_ops.model import check
from ddtree_ops.model.types import Backend, Deployment, Group, Host, Nodes, Rank, Service
from ddtree_ops.model.validate import is_loopback
from ddtree_ops.model.yamlfile import Node, position

_KEYS = ("port", "ranks")
_ADDRESS = "the IP address of that host by which the other nodes reach it, such as 10.0.0.1"
#: Between two ports of a service: an engine takes some after the one that it is told.
SPACING = 10
#: What may differ between the ranks of one service: what a host's rules say of how it runs there.
_OWN = ("env", "memory_fraction", "load_timeout_s", "stop_timeout_s", "applied_rules", "nodes")


def parse_nodes(node: Node) -> Nodes:
    """The ``nodes:`` of a service. Raises UsageError at the key in question.

    Whether the hosts exist and have room is found once all hosts are read (`join`).
    """
    nodes = check.mapping(node, _KEYS, required=_KEYS)
    ranks = check.items(nodes["ranks"], _rank, least=2)
    for index, rank in enumerate(ranks):
        for other in range(index):
            item = nodes["ranks"].value[index]
            if ranks[other].host == rank.host:
                item.fail(f"{rank.host} is rank {other} already", allowed="each host once")
            if ranks[other].address == rank.address:
                item.fail(f"{rank.address} is {ranks[other].host}'s address already", allowed="each address once")
    loop = [is_loopback(rank.address) for rank in ranks]
    if any(loop) and not all(loop):
        odd = nodes["ranks"].value[loop.index(True)]
        odd.fail("a loopback address, which the other nodes cannot reach", allowed=_ADDRESS)
    most = 65_535 - SPACING * len(ranks)
    return Nodes(ranks=ranks, port=check.integer(nodes["port"], 1024, most))


def _rank(node: Node) -> Rank:
    nodes = check.mapping(node, ("host", "address"), required=("host", "address"))
    address = check.text(nodes["address"], allowed=_ADDRESS)
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        nodes["address"].fail(f"not {check.describe(nodes['address'])}", allowed=_ADDRESS)
    return Rank(host=check.name(nodes["host"]), address=str(found), line=node.line, path=node.path)


def join(hosts: Mapping[str, Host]) -> dict[str, Host]:
    """The hosts with the further ranks of their services added.

    Raises UsageError, with file and key, for a host that is not there, that has a service of that name, or whose GPUs
    or ports another service uses.
    """
    joined = {name: dict(host.services) for name, host in hosts.items()}
    for host in hosts.values():
        for name, service in host.services.items():
            for rank, one in enumerate(service.nodes.ranks if service.nodes is not None else ()):
                _check(hosts, host, service, name, rank, one)
                if rank:
                    _fit(hosts[one.host], joined[one.host], host, service, name, one)
                    joined[one.host][name] = msgspec.structs.replace(service, lead=host.name)
    return {name: msgspec.structs.replace(host, services=joined[name]) for name, host in hosts.items()}


def _check(hosts: Mapping[str, Host], lead: Host, service: Service, name: str, rank: int, one: Rank) -> None:
    if one.host not in hosts:
        _fail(lead, one, f"no host '{one.host}'{check.nearest(one.host, hosts)}", ", ".join(hosts))
    if rank == 0 and one.host != lead.name:
        _fail(lead, one, f"rank 0 is the host that {name} is written at", f"{lead.name} first")
    for index in service.gpus:
        if index >= hosts[one.host].gpus.count:
            _fail(lead, one, f"{one.host} has no GPU {index}", f"GPUs that every node has: gpus of {name}")


def _fit(host: Host, services: Mapping[str, Service], lead: Host, service: Service, name: str, one: Rank) -> None:
    if name in services:
        whose = f"rank of {services[name].lead}'s" if services[name].lead else "service of its own"
        _fail(lead, one, f"{host.name} has {name} already, a {whose}", "a name that is free on every node")
    for other, known in services.items():
        taken = {known.port, *([known.router.metrics_port] if known.router is not None else [])}
        if service.port in taken:
            _fail(lead, one, f"port {service.port} is {other}'s on {host.name}", "one service a port")
        if both := sorted(set(known.gpus) & set(service.gpus)):
            _fail(lead, one, f"GPU {both[0]} of {host.name} is used by {other}", "one service a GPU")


def _fail(lead: Host, one: Rank, problem: str, allowed: str) -> NoReturn:
    raise UsageError(position(lead.file, one.line, one.path, problem, allowed))


def group_of(host: Host, service: Service) -> Group | None:
    """What a host's rank of a service runs with; None for a service on one host."""
    if service.nodes is None:
        return None
    ranks = service.nodes.ranks
    return Group(
        rank=[one.host for one in ranks].index(host.name),
        addresses=[one.address for one in ranks],
        port=service.nodes.port,
    )


def at_port(deployment: Deployment, port: int) -> Deployment:
    """The same with its ranks meeting at another port."""
    group = deployment.profile.nodes
    assert group is not None
    profile = msgspec.structs.replace(deployment.profile, nodes=msgspec.structs.replace(group, port=port))
    return msgspec.structs.replace(
        deployment, profile=profile, others=[at_port(one, port) for one in deployment.others]
    )


def ports(deployment: Deployment) -> list[int]:
    """The ports at which its ranks may meet, one more than there are nodes.

    Each deploy takes one at which no node's present generation would meet the others: nodes that stand on different
    deploys never form a service.
    """
    nodes = deployment.service.nodes
    assert nodes is not None
    return [nodes.port + SPACING * index for index in range(len(nodes.ranks) + 1)]


def require_alike(lead: Deployment, others: Sequence[Deployment]) -> None:
    """Raises UsageError where a host's rules make its rank another computation than rank 0's."""
    assert lead.service.nodes is not None
    for at, other in zip(lead.service.nodes.ranks[1:], others, strict=True):
        for field in lead.profile.__struct_fields__:
            mine, theirs = getattr(lead.profile, field), getattr(other.profile, field)
            if field not in _OWN and mine != theirs:
                problem = f"{field} is {theirs} on {other.host.name} and {mine} on {lead.host.name}"
                _fail(lead.host, at, problem, "rules that are the same on every node")


def require_answers(host: Host, name: str, service: Service, backend: Backend) -> None:
    """Raises UsageError where a router would send requests to a rank that answers none."""
    if service.lead is not None:
        problem = f"{backend} is a further rank of {service.lead}/{name} and answers nobody"
        raise UsageError(position(host.file, backend.line, backend.path, problem, f"{service.lead}/{name}"))
