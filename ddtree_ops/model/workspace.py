"""Where the workspace is, and reading all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ddtree_ops.errors import UsageError
from ddtree_ops.model import check
from ddtree_ops.model.hostfile import parse_host
from ddtree_ops.model.profilefile import parse_profile
from ddtree_ops.model.types import RawProfile, Workspace
from ddtree_ops.model.yamlfile import position, read_yaml

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
    default: tuple[str, str, int] | None = None
    for name, file, shown in _files(folder, path):
        root = read_yaml(file, shown)
        if name == _WORKSPACE_FILE:
            nodes = check.mapping(root, ("default_host",))
            if "default_host" in nodes:
                default = (check.name(nodes["default_host"]), shown, nodes["default_host"].line)
            continue
        if name in _RESERVED:
            raise UsageError(f"{shown}: '{name}' cannot be a host's name: --host {name} means every host")
        hosts[name] = parse_host(root, name, path)
    if default is not None and default[0] not in hosts:
        problem = f"no host '{default[0]}'{check.nearest(default[0], hosts)}"
        raise UsageError(position(default[1], default[2], "default_host", problem, ", ".join(hosts)))
    profiles = {
        name: parse_profile(read_yaml(file, shown), name) for name, file, shown in _files(folder / "profiles", path)
    }
    _check_extends(profiles)
    return Workspace(path=path, default_host=default[0] if default else None, hosts=hosts, profiles=profiles)


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
