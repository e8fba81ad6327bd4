"""What a merged profile may not say, alone or on its host. Each refusal names the line that says it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, NoReturn

from ddtree_ops.engine.ladder import parse_ladder
from ddtree_ops.errors import UsageError
from ddtree_ops.model.owned import owner
from ddtree_ops.model.types import Host, Nodes, Origin, Service
from ddtree_ops.model.yamlfile import position

# Set for every service by units.launch() or its supervisor: caches, the GPUs that are seen, which Python runs.
OWNED_ENV = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CREDENTIALS_DIRECTORY",
    "DDTREE_SERVICE",
    "HOME",
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONNOUSERSITE",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED",
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
)


def refuse_contradictions(
    host: Host, service: Service, where: Origin, values: Mapping[str, Any], origins: Mapping[str, Origin]
) -> None:
    """Raise UsageError at the first contradiction. ``where`` is the service, for values that nobody wrote."""

    def fail(key: str, problem: str, allowed: str) -> NoReturn:
        at = origins.get(key, where)
        path = at.path if key in origins else f"{where.path}: {key}"
        raise UsageError(position(at.file, at.line, path, problem, allowed))

    _algorithm(values, fail)
    nodes = len(service.nodes.ranks) if service.nodes is not None else 1
    _engine(nodes, values, fail)
    _addresses(host, values, fail)
    if service.nodes is not None:
        _nodes(host, service.nodes, values, fail)
    for index, argument in enumerate(values["extra_args"]):
        key = owner(argument)
        if key is not None:
            flag = argument.partition("=")[0]
            fail(f"extra_args[{index}]", f"{flag} belongs to {key}", f"set {key} instead; extra_args are for the rest")
    for name in values["env"]:
        if name in OWNED_ENV:
            fail(f"env.{name}", "is set by ddtree for every service", f"other names than {', '.join(OWNED_ENV)}")
    ranks = values["tp"] * values["pp"]
    if values["engine"] == "sglang" and ranks > len(service.gpus) * nodes:
        each = f" on each of {nodes} nodes" if nodes > 1 else ""
        raise UsageError(
            position(
                where.file,
                where.line,
                f"{where.path}.gpus",
                f"{len(service.gpus)} GPUs{each} for tp {values['tp']} x pp {values['pp']} = {ranks} ranks",
                f"at least {ranks // nodes} GPUs{each}, or a smaller tp",
            )
        )


def _algorithm(values: Mapping[str, Any], fail: Any) -> None:
    algorithm, vocabulary = values["algorithm"], values["vocab_size"]
    if algorithm != "none" and values["drafter"] is None:
        fail("algorithm", f"{algorithm} needs a drafter", "drafter: a path, in this profile or in the service's base")
    if algorithm == "ddtree":
        for key in ("budget", "topk"):
            if values[key] is None:
                fail("algorithm", f"ddtree needs {key}", f"{key}: a whole number from 1")
        try:
            parse_ladder(values["ladder"], values["budget"])
        except ValueError as error:
            fail("ladder", str(error), "more requests and a smaller budget at each step, such as 8:8,32:0")
        if vocabulary is not None and values["topk"] > vocabulary:
            fail("topk", f"{values['topk']} is more than the vocabulary has", f"from 1 to {vocabulary} (vocab_size)")


def _nodes(host: Host, nodes: Nodes, values: Mapping[str, Any], fail: Any) -> None:
    count, ranks = len(nodes.ranks), values["tp"] * values["pp"]
    if ranks % count:
        fail("tp", f"tp x pp = {ranks} ranks on {count} nodes", f"a multiple of {count}")
    if not is_loopback(values["bind"]):
        problem = (
            f"{values['bind']} would need ports open to others than the nodes, on which workers unpickle what comes"
        )
        fail("bind", problem, "127.0.0.1; a router or a proxy on the first node takes requests from elsewhere")
    apart = not all(is_loopback(rank.address) for rank in nodes.ranks)
    if host.supervisor != "systemd" and apart and values["open"] is None:
        problem = f"on {host.name} nothing keeps others off the workers' ports, which unpickle what comes"
        fail("open", problem, "supervisor: systemd; or open: the reason why nobody else reaches it")


def _engine(nodes: int, values: Mapping[str, Any], fail: Any) -> None:
    if values["engine"] == "sglang":
        if values["algorithm"] == "ddtree" and values["attention_backend"] != "triton":
            fail(
                "attention_backend",
                f"{values['attention_backend']} does not read the tree's mask",
                "triton, with algorithm: ddtree",
            )
        return
    if nodes > 1 and values["tp"] != nodes:
        fail("tp", f"the reference engine has one rank on each of {nodes} nodes", f"tp: {nodes}")
    for key, only in (("tp", nodes), ("pp", 1), ("ep", 1), ("cuda_graph", False), ("attention_backend", None)):
        if values[key] != only:
            fail(key, "the reference engine has none", "leave it out, or engine: sglang")
    if values["memory_fraction"] is not None:
        fail("memory_fraction", "the reference engine has none", "leave it out, or engine: sglang")
    if values["dtype"] not in ("float32", "bfloat16"):
        fail("dtype", f"the reference engine has no {values['dtype']}", "float32, bfloat16")


def _addresses(host: Host, values: Mapping[str, Any], fail: Any) -> None:
    key = values["api_key"]
    if not is_loopback(values["bind"]) and key is None and values["open"] is None:
        fail(
            "bind",
            f"{values['bind']} serves beyond this host without a key",
            "127.0.0.1; or api_key: {file: /path/on/the/host}; or open: the reason for serving everybody",
        )
    if key is None:
        return
    if values["engine"] == "sglang":
        fail(
            "api_key",
            "SGLang 0.5.17 takes a key only in its arguments, which every user of the host can read",
            "engine: reference; or bind: 127.0.0.1 behind a proxy that asks for the key",
        )
    reference = host.secrets.get(key.secret, key) if key.secret else key
    if reference.env is not None:
        fail(
            "api_key",
            "a service outlives the environment it is deployed from, so its key must be a file on the host",
            "{file: /absolute/path/on/the/host}",
        )


def is_loopback(bind: str) -> bool:
    """Whether a service that binds there is reached from its own host only."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"
