"""Where the workspace is, and reading all of it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ddtree_ops.errors import UsageError
from ddtree_ops.model import check
from ddtree_ops.model.hostfile import parse_host
from ddtree_ops.model.nodes import join
from ddtree_ops.model.profilefile import parse_profile
from ddtree_ops.model.routers import check_routers
from ddtree_ops.model.types import Host, RawProfile, Workspace
from ddtree_ops.model.yamlfile import Node, position, read_yaml

ENVIRONMENT = "DDTREE_WORKSPACE"
INVENTORIES = "inventories"
_WORKSPACE_FILE = "workspace"
# `--host all` means every host.
_RESERVED = ("all",)


def find_workspace(explicit: Path | None = None, *, start: Path | None = None) -> Path:
    """The directory that holds ``inventories/``: ``explicit``, else $DDTREE_WORKSPACE, else upwards from ``start``.

    ``start`` is the current directory by default. Raises UsageError when there is none.
    """
    said = os.environ.get(ENVIRONMENT, "")
    for given, source in ((explicit, "--workspace"), (Path(said) if said else None, ENVIRONMENT)):
        if given is not None:
            if not (given / INVENTORIES).is_dir():
                raise UsageError(f"{source} {given}: has no {INVENTORIES}/", hint=f"ddtree init {given}")
            return given.resolve()
    here = (start or Path.cwd()).resolve()
    for directory in (here, *here.parents):
        if (directory / INVENTORIES).is_dir():
            return directory
    raise UsageError(
        f"no workspace: neither {here} nor a directory above it has {INVENTORIES}/",
        hint=f"ddtree init DIR makes one; --workspace or {ENVIRONMENT} names one",
    )


def load_workspace(path: Path) -> Workspace:
    """Read and check every file of ``path/inventories``. Raises UsageError at the first thing that is wrong.

    What only a service's host, base and profile together can get wrong is found by ``resolve``.
    """
    folder = path / INVENTORIES
    hosts = {}
    fleet = _Fleet()
    for name, file, shown in _files(folder, path):
        root = read_yaml(file, shown)
        if name == _WORKSPACE_FILE:
            fleet = _fleet(root)
            continue
        if name in _RESERVED:
            raise UsageError(f"{shown}: '{name}' cannot be a host's name: --host {name} means every host")
        hosts[name] = parse_host(root, name, path)
    _check_fleet(fleet, hosts)
    hosts = join(hosts)
    check_routers(hosts)
    first = {name: index for index, (name, _) in enumerate(fleet.order)}
    hosts = dict(sorted(hosts.items(), key=lambda item: (first.get(item[0], len(first)), item[0])))
    profiles = {
        name: parse_profile(read_yaml(file, shown), name) for name, file, shown in _files(folder / "profiles", path)
    }
    _check_extends(profiles)
    return Workspace(
        path=path,
        default_host=fleet.default[0] if fleet.default else None,
        hosts=hosts,
        profiles=profiles,
        groups={name: [host for host, _ in members] for name, members in fleet.groups.items()},
        max_unavailable=fleet.max_unavailable,
    )


_Named: TypeAlias = tuple[str, Node]


@dataclass
class _Fleet:
    """workspace.yaml: names with where they were written."""

    default: _Named | None = None
    order: list[_Named] = field(default_factory=list)
    groups: dict[str, list[_Named]] = field(default_factory=dict)
    max_unavailable: int = 1


def _fleet(root: Node) -> _Fleet:
    nodes = check.mapping(root, ("default_host", "order", "groups", "max_unavailable"))
    found = _Fleet()
    if "default_host" in nodes:
        found.default = (check.name(nodes["default_host"]), nodes["default_host"])
    if "order" in nodes:
        found.order = _names(nodes["order"])
    if "groups" in nodes:
        for name, child in check.any_mapping(nodes["groups"]).items():
            if not re.fullmatch(check.NAME_FORM, name) or name in _RESERVED:
                child.fail("not a group's name", allowed=f"{check.NAME_TEXT}; not {', '.join(_RESERVED)}")
            found.groups[name] = _names(child)
    if "max_unavailable" in nodes:
        found.max_unavailable = check.integer(nodes["max_unavailable"], 1, 64)
    return found


def _names(node: Node) -> list[_Named]:
    found = check.items(node, lambda item: (check.name(item), item), least=1)
    for index, (name, item) in enumerate(found):
        if name in (earlier for earlier, _ in found[:index]):
            item.fail(f"{name} is written twice")
    return found


def _check_fleet(fleet: _Fleet, hosts: Mapping[str, Host]) -> None:
    every = [*([fleet.default] if fleet.default else []), *fleet.order, *itertools.chain(*fleet.groups.values())]
    for name, node in every:
        if name not in hosts:
            node.fail(f"no host '{name}'{check.nearest(name, hosts)}", allowed=", ".join(hosts))
    for group, members in fleet.groups.items():
        if group in hosts:
            members[0][1].fail(f"the group {group} has a host's name", allowed="a name of its own")


def _files(folder: Path, workspace: Path) -> Iterator[tuple[str, Path, str]]:
    """(name, path, path as shown) of the YAML files of a directory, by name."""
    if not folder.is_dir():
        return
    for file in sorted(folder.iterdir()):
        shown = str(file.relative_to(workspace))
        if file.name.startswith(".") or file.suffix not in (".yaml", ".yml"):
            continue
        if file.suffix == ".yml":
            raise UsageError(f"{shown}: would not be read", hint=f"rename it to {file.stem}.yaml")
        if not re.fullmatch(check.NAME_FORM, file.stem):
            raise UsageError(f"{shown}: the file's name is the host's or profile's; allowed: {check.NAME_TEXT}")
        yield file.stem, file, shown


def _check_extends(profiles: dict[str, RawProfile]) -> None:
    for profile in profiles.values():
        seen = [profile.name]
        current = profile
        while current.extends is not None:
            at = current.origins["extends"]
            if current.extends not in profiles:
                problem = f"no profile '{current.extends}'{check.nearest(current.extends, profiles)}"
                raise UsageError(position(at.file, at.line, "extends", problem, ", ".join(profiles)))
            if current.extends in seen:
                cycle = " -> ".join([*seen[seen.index(current.extends) :], current.extends])
                raise UsageError(position(at.file, at.line, "extends", f"goes round in a circle: {cycle}"))
            seen.append(current.extends)
            current = profiles[current.extends]
