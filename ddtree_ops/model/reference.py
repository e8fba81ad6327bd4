"""docs/reference.md: every key of an inventory, what it means, what it may be, its default.

``python -m ddtree_ops.model.reference`` prints it. What a key may be is what its own parser says when it is given
something else, and a default is what the parser makes of a file without the key: neither can differ from what happens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ddtree_ops.errors import UsageError
from ddtree_ops.model import hostfile, workspace
from ddtree_ops.model.meanings import HOST, PROFILE, WORKSPACE
from ddtree_ops.model.profilefile import parse_profile
from ddtree_ops.model.resolve import DEFAULTS, ENGINE_DEFAULTS
from ddtree_ops.model.types import ReleaseOptions
from ddtree_ops.model.yamlfile import Node

HEAD = """\
# Keys of the inventory

Written by `python -m ddtree_ops.model.reference`; a test holds it to the code. A workspace is a directory with
`inventories/`: one file for each host, `workspace.yaml`, and `profiles/`, one file for each profile. Files are YAML
without anchors, tags and merge keys. An unknown key, or a value that is not allowed, is refused with its file, its line
and the nearest right name before any host is contacted.
"""
GPUS = {"count": 8, "name": "H200", "arch": "sm_90", "memory_gib": 141, "interconnect": "nvlink"}
MINIMAL: dict[str, Any] = {
    "address": "host.example.net",
    "gpus": GPUS,
    "services": {"name": {"profile": "b8k4", "port": 30000}},
}
#: The same with a router, which has no profile.
ROUTED: dict[str, Any] = {
    **MINIMAL,
    "services": {"name": {"port": 30000, "router": {"backends": ["host/service"]}}},
}
#: The same over two hosts.
OVER_TWO: dict[str, Any] = {
    **MINIMAL,
    "services": {
        "name": {
            "profile": "b8k4",
            "port": 30000,
            "nodes": {
                "port": 20000,
                "ranks": [{"host": "host", "address": "10.0.0.1"}, {"host": "other", "address": "10.0.0.2"}],
            },
        }
    },
}
#: Keys that must be there where what they belong to is.
REQUIRED = re.compile(
    r"evidence\.\w+|address|gpus|gpus\.\w+|services|services\.NAME\.(profile|port|router\.backends|nodes\.\w+|nodes\.ranks\[\]\.\w+)|rules\[\]\.\w+|checks\.NAME\.\w+"
)


class Key(NamedTuple):
    """A row: ``allowed`` as the parser says it, ``default`` as YAML, "required" or "none"."""

    path: str
    meaning: str
    allowed: str
    default: str


def profile_keys() -> list[Key]:
    return [Key(path, meaning, _profile_allows(path), _profile_default(path)) for path, meaning in PROFILE.items()]


def host_keys() -> list[Key]:
    def parse(document: Any) -> Any:
        return hostfile.parse_host(_node(document), "host", Path("/workspace"))

    rows = []
    for path, meaning in HOST.items():
        document = ROUTED if ".router" in path else OVER_TWO if ".nodes." in path else MINIMAL
        found = parse(ROUTED if ".router." in path else MINIMAL)
        default = "required" if REQUIRED.fullmatch(path) else _yaml(_of(found, path))
        rows.append(Key(path, meaning, _allowed(parse, document, path), default))
    return rows


def workspace_keys() -> list[Key]:
    def parse(document: Any) -> Any:
        return workspace._fleet(_node(document))

    return [
        Key(path, meaning, _allowed(parse, {}, path), {"max_unavailable": "1"}.get(path, "none"))
        for path, meaning in WORKSPACE.items()
    ]


def markdown() -> str:
    parts = [HEAD]
    for title, said, keys in (
        ("A profile", "`inventories/profiles/*.yaml`. A service's `profile` goes over its `base`, key by key; "
         "`env`, `exactness` and `checks` are merged by name, `extra_args` are appended.", profile_keys()),
        ("A host", "`inventories/*.yaml`.", host_keys()),
        ("The workspace", "`inventories/workspace.yaml`; the file may be absent.", workspace_keys()),
    ):  # fmt: skip
        rows = "\n".join(f"| `{k.path}` | {k.meaning} | {_cell(k.allowed)} | {_cell(k.default)} |" for k in keys)
        parts.append(f"## {title}\n\n{said}\n\n| key | means | may be | default |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _profile_allows(path: str) -> str:
    def parse(document: Any) -> Any:
        return parse_profile(_node(document), "profile")

    if path == "extends":
        return _allowed(parse, {}, path)
    said = _allowed(parse, {}, path)
    try:
        parse(_put({}, path.replace("NAME", "name"), None))
    except UsageError:
        return said
    return f"{said}; or null"


def _profile_default(path: str) -> str:
    if path in ("engine", "model"):
        return "required, of the profile or its base"
    value: Any = DEFAULTS
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return "required" if REQUIRED.fullmatch(path) else "none"
        value = value[part]
    by_engine = {engine: values[path] for engine, values in ENGINE_DEFAULTS.items() if path in values}
    if by_engine:
        return ", ".join(f"{_yaml(value)} ({engine})" for engine, value in by_engine.items())
    return _yaml(value)


def _yaml(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, Mapping | ReleaseOptions):
        return "as below"
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _of(found: Any, path: str) -> Any:
    """The value of a parsed host under a key's path, None where there is none of it."""
    for part in path.replace("NAME", "name").replace("[]", "").split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    return found


def _allowed(parse: Callable[[Any], Any], document: dict[str, Any], path: str) -> str:
    """What the parser says is allowed in that place, when it is given what cannot be right there."""
    path = path.replace("NAME", "name")
    wrongs: tuple[Any, ...] = ({}, [], [{}], "\0")
    for wrong in wrongs:
        try:
            parse(_put(document, path, wrong))
        except UsageError as error:
            place = error.message.split(": ", 1)[1]
            if "; allowed: " in place:
                said = place.split("; allowed: ", 1)[1]
                return f"{said}; each {_item(parse, document, path)}" if said == "[a, b, ...]" else said
    raise AssertionError(f"{path}: its parser takes anything")


def _item(parse: Callable[[Any], Any], document: dict[str, Any], path: str) -> str:
    """What an item of the list in that place may be."""
    try:
        parse(_put(document, path, [{}, {}]))
    except UsageError as error:
        return error.message.split("; allowed: ", 1)[1]
    raise AssertionError(f"{path}: its items may be anything")


def _put(document: dict[str, Any], path: str, value: Any, above: str = "") -> dict[str, Any]:
    """The document with another value in that place; ``[]`` in a path is the first item of a list."""
    first, _, rest = path.partition(".")
    name, here = first.removesuffix("[]"), f"{above}{first}"
    if not rest:
        return {**document, name: value}
    inner = document.get(name)
    if isinstance(inner, list) and first != name:
        return {**document, name: [_put(inner[0], rest, value, f"{here}."), *inner[1:]]}
    placed = _put(inner if isinstance(inner, dict) else _BESIDE.get(here, {}), rest, value, f"{here}.")
    return {**document, name: placed if first == name else [placed]}


#: What is right beside the key in question, where its parser looks at that first.
_BESIDE: dict[str, dict[str, Any]] = {
    "rules[]": {"when": {"engine": "sglang"}, "set": {"cuda_graph": False}, "reason": "a reason"},
    "checks.name": {"severity": "off", "reason": "a reason"},
    "evidence": {"records": "sweeps/records.jsonl", "sha256": "0" * 64},
}


def _node(value: Any, path: str = "") -> Node:
    """A document as the reader of files would give it."""

    def children() -> Iterator[tuple[str, Node]]:
        for key, inner in value.items():
            yield key, _node(inner, f"{path}.{key}".lstrip("."))

    if isinstance(value, dict):
        return Node(dict(children()), "FILE", 1, path)
    if isinstance(value, list):
        return Node([_node(item, path) for item in value], "FILE", 1, path)
    return Node(value, "FILE", 1, path, raw=str(value))


if __name__ == "__main__":
    print(markdown(), end="")
