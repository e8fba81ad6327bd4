"""One host file: address, GPUs, services, rules; checked against itself."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from ddtree_ops.model import check, secrets
from ddtree_ops.model.nodes import parse_nodes
from ddtree_ops.model.profilefile import ALGORITHMS, ENGINES, PROFILE_KEYS
from ddtree_ops.model.routerfile import ROUTER, parse_router
from ddtree_ops.model.types import Gpus, Host, ReleaseOptions, Rule, SecretRef, Service, When
from ddtree_ops.model.yamlfile import Node

DEFAULT_ROOT = "/opt/ddtree"
_ARCH_TEXT = "none, or sm_ and the compute capability: sm_90, sm_103, sm_120"
_KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
_ROOT_FORM = re.compile(r"[A-Za-z0-9._/+@-]+")

_HOST_KEYS = (
    "address",
    "user",
    "port",
    "host_key",
    "known_hosts",
    "identity_file",
    "sudo",
    "root",
    "supervisor",
    "transport",
    "gpus",
    "release",
    "services",
    "rules",
    "secrets",
)
_SSH_ONLY = ("user", "port", "host_key", "known_hosts", "identity_file")

# A rule may say how a host runs what was asked, never what was asked: a budget that a rule changed would be measured
# and reported as something else.
_RULE_SETS = (
    "cuda_graph",
    "attention_backend",
    "memory_fraction",
    "context_length",
    "max_running_requests",
    "extra_args",
    "env",
    "load_timeout_s",
    "stop_timeout_s",
)
_WHEN_KEYS: dict[str, Callable[[Node], Any]] = {
    "arch": lambda node: _arch(node),
    "engine": lambda node: check.choice(node, ENGINES),
    "algorithm": lambda node: check.choice(node, ALGORITHMS),
    "min_budget": lambda node: check.integer(node, 1, 1024),
    "max_budget": lambda node: check.integer(node, 1, 1024),
}


def parse_host(root: Node, name: str, workspace: Path) -> Host:
    """A host file's values. Relative ``known_hosts`` and ``identity_file`` are relative to ``workspace``.

    Raises UsageError at the key in question, also for what contradicts itself: two services on one port or GPU.
    """
    nodes = check.mapping(root, _HOST_KEYS, required=("address", "gpus", "services"))
    transport = cast(
        Literal["ssh", "local"], _get(nodes, "transport", lambda n: check.choice(n, ("ssh", "local")), "ssh")
    )
    supervisor = cast(
        Literal["systemd", "process"],
        _get(nodes, "supervisor", lambda n: check.choice(n, ("systemd", "process")), "systemd"),
    )
    if transport == "local":
        for key in _SSH_ONLY:
            if key in nodes:
                nodes[key].fail("means nothing with transport: local", allowed="leave it out")
    if "host_key" in nodes and "known_hosts" in nodes:
        nodes["known_hosts"].fail("host_key is given too", allowed="one of host_key and known_hosts")
    gpus = _gpus(nodes["gpus"])
    return Host(
        name=name,
        address=check.address(nodes["address"]),
        user=_get(nodes, "user", lambda n: check.pattern(n, "[a-z_][a-z0-9_-]{0,31}", "a Unix user name"), "root"),
        port=_get(nodes, "port", lambda n: check.integer(n, 1, 65_535), 22),
        host_key=_get(nodes, "host_key", _host_key, None),
        known_hosts=_get(nodes, "known_hosts", lambda n: _local_file(n, workspace), None),
        identity_file=_get(nodes, "identity_file", lambda n: _local_file(n, workspace), None),
        sudo=_get(nodes, "sudo", check.boolean, False),
        root=_get(nodes, "root", lambda n: _root(n, supervisor), _default_root(transport, supervisor)),
        supervisor=supervisor,
        transport=transport,
        gpus=gpus,
        services=_services(nodes["services"], gpus),
        rules=check.items(nodes["rules"], _rule) if "rules" in nodes else [],
        secrets=_secrets(nodes["secrets"]) if "secrets" in nodes else {},
        file=root.file,
        release=_release(nodes["release"]) if "release" in nodes else ReleaseOptions(),
    )


def _get(nodes: dict[str, Node], key: str, parse: Callable[[Node], Any], default: Any) -> Any:
    return parse(nodes[key]) if key in nodes else default


def _default_root(transport: str, supervisor: str) -> str:
    if transport == "local" and supervisor == "process":
        data = os.environ.get("XDG_DATA_HOME", "")
        # The XDG specification: a relative path there is invalid and ignored.
        base = Path(data) if data.startswith("/") else Path("~/.local/share").expanduser()
        return str(base / "ddtree")
    return DEFAULT_ROOT


def _root(node: Node, supervisor: str) -> str:
    value = check.absolute_path(node)
    if supervisor == "systemd" and not _ROOT_FORM.fullmatch(value):
        node.fail(f"not {check.describe(node)}", allowed="letters, digits and . _ / + @ - (it is part of units)")
    return value


def _local_file(node: Node, workspace: Path) -> str:
    value = check.text(node, allowed="a file here: absolute, ~/..., or relative to the workspace")
    return value if value.startswith("~") else str(workspace / value)


def _host_key(node: Node) -> str:
    allowed = '"ssh-ed25519 AAAA...", the first two words of the host\'s ssh_host_ed25519_key.pub'
    words = check.text(node, allowed=allowed).split()
    if len(words) not in (2, 3) or words[0] not in _KEY_TYPES:
        node.fail("not a public host key", allowed=allowed)
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError):
        node.fail("the key is not base64", allowed=allowed)
    length = int.from_bytes(blob[:4], "big")
    if blob[4 : 4 + length] != words[0].encode() or len(blob) < 40:
        node.fail(f"the key is cut short or not an {words[0]} key", allowed=allowed)
    return f"{words[0]} {words[1]}"


def _arch(node: Node) -> str:
    return check.pattern(node, "none|sm_[1-9][0-9]{1,2}[af]?", _ARCH_TEXT)


def _gpus(node: Node) -> Gpus:
    keys = ("count", "name", "arch", "memory_gib", "interconnect")
    nodes = check.mapping(node, keys, required=keys)
    gpus = Gpus(
        count=check.integer(nodes["count"], 0, 64),
        name=check.text(nodes["name"]),
        arch=_arch(nodes["arch"]),
        memory_gib=check.integer(nodes["memory_gib"], 0, 4096),
        interconnect=cast(
            Literal["pcie", "nvlink", "none"], check.choice(nodes["interconnect"], ("pcie", "nvlink", "none"))
        ),
    )
    if (gpus.count == 0) != (gpus.arch == "none"):
        nodes["arch"].fail(f"not {gpus.arch} with count {gpus.count}", allowed="none if and only if count is 0")
    return gpus


def _release(node: Node) -> ReleaseOptions:
    nodes = check.mapping(node, ("wheels", "slim", "provided"))
    return ReleaseOptions(
        wheels=cast(
            Literal["ship", "index"], _get(nodes, "wheels", lambda n: check.choice(n, ("ship", "index")), "ship")
        ),
        slim=_get(nodes, "slim", check.boolean, False),
        provided=check.items(nodes["provided"], _distribution) if "provided" in nodes else [],
    )


def _distribution(node: Node) -> str:
    form = r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.+!_-]+)?"
    return check.pattern(node, form, "a distribution's name, such as torch, or name==version")


def _services(node: Node, gpus: Gpus) -> dict[str, Service]:
    services: dict[str, Service] = {}
    ports: dict[int, str] = {}
    owners: dict[int, str] = {}
    for name, child in check.any_mapping(node).items():
        if not re.fullmatch(check.NAME_FORM, name):
            child.fail("not a service's name", allowed=check.NAME_TEXT)
        if "router" in check.any_mapping(child):
            nodes = check.mapping(child, ("router", "port"), required=("port",))
        else:
            keys = ("profile", "base", "port", "gpus", "router", "nodes")
            nodes = check.mapping(child, keys, required=("profile", "port"))
        # A service runs as an unprivileged user, which cannot listen below 1024.
        port = check.integer(nodes["port"], 1024, 65_535)
        router = parse_router(nodes["router"]) if "router" in nodes else None
        taken = [(port, nodes["port"])]
        if router is not None:
            taken.append((router.metrics_port, nodes["router"].child("metrics_port") or nodes["router"]))
        for number, where in taken:
            if number in ports:
                where.fail(f"{number} is the port of {ports[number]} too", allowed="one service a port")
            ports[number] = name
        indices: list[int] = []
        for item in check.items(nodes["gpus"], lambda each: each) if "gpus" in nodes else []:
            index = (
                check.integer(item, 0, gpus.count - 1)
                if gpus.count
                else item.fail("this host has no GPUs", allowed="[]")
            )
            if index in owners:
                item.fail(f"GPU {index} is used by {owners[index]} already", allowed="one service a GPU")
            owners[index] = name
            indices.append(index)
        services[name] = Service(
            profile=check.name(nodes["profile"]) if router is None else ROUTER,
            base=check.name(nodes["base"]) if "base" in nodes else None,
            port=port,
            gpus=indices,
            line=child.line,
            router=router,
            nodes=parse_nodes(nodes["nodes"]) if "nodes" in nodes else None,
        )
    return services


def _rule(node: Node) -> Rule:
    nodes = check.mapping(node, ("when", "set", "reason"), required=("when", "set", "reason"))
    when = check.mapping(nodes["when"], tuple(_WHEN_KEYS))
    changes = check.mapping(nodes["set"], _RULE_SETS)
    for key, child in (("when", when), ("set", changes)):
        if not child:
            nodes[key].fail("empty", allowed=", ".join(_WHEN_KEYS if key == "when" else _RULE_SETS))
    return Rule(
        when=When(**{key: _WHEN_KEYS[key](child) for key, child in when.items()}),
        set={key: PROFILE_KEYS[key](child) for key, child in changes.items()},
        reason=check.text(nodes["reason"]),
        file=node.file,
        line=node.line,
    )


def _secrets(node: Node) -> dict[str, SecretRef]:
    found: dict[str, SecretRef] = {}
    if not isinstance(node.value, dict):
        node.fail("expected a mapping", allowed=f"NAME: {secrets.REFERENCE}")
    for name, child in check.any_mapping(node).items():
        if not re.fullmatch(secrets.SECRET_NAME, name):
            child.fail("not a secret's name", allowed=secrets.SECRET_NAME_TEXT)
        found[name] = secrets.secret_ref(child)
    return found
