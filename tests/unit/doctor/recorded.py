"""Recorded facts: a healthy file a machine, and sick ones as small differences from one of them.

A sick file says what it differs in: ``set`` is a list of [path, value]; a path is a list of keys and indices, ``*``
stands for all of them, the value "DELETE" takes a key away. ``profile`` is YAML over the service's profile, ``host``
changes the inventory. ``label`` says what of it was measured and what is made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree_ops.doctor.check import Case
from ddtree_ops.doctor.facts import host_facts
from ddtree_ops.model import Deployment, init_workspace, load_workspace, resolve

FACTS = Path(__file__).parent / "facts"
HEALTHY = sorted(path.stem for path in (FACTS / "healthy").glob("*.json"))
SICK = sorted(path.stem for path in (FACTS / "sick").glob("*.json"))

H200 = """\
address: 192.0.2.9
gpus: {count: 1, name: H200, arch: ARCH, memory_gib: 140, interconnect: none}
services:
  pair: {base: pair, profile: b8k4, port: 30000, gpus: [0]}
"""
PAIR = """\
engine: sglang
model: /models/pair/target
drafter: /models/pair/draft
block_size: 8
vocab_size: 2048
min_accept_length: 2.0
memory_fraction: 0.3
"""


def load(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FACTS / kind / f"{name}.json").read_text(encoding="utf-8"))
    return found


def change(value: Any, path: list[Any], to: Any) -> None:
    """Set what is at a path below ``value``."""
    first, *rest = path
    keys = list(value) if first == "*" and isinstance(value, dict) else range(len(value)) if first == "*" else [first]
    for key in keys:
        if rest:
            change(value[key], rest, to)
        elif to == "DELETE":
            del value[key]
        else:
            value[key] = to


def sick_reply(name: str) -> dict[str, Any]:
    """The whole reply of a sick host."""
    sick = load("sick", name)
    reply = load("healthy", sick["of"])
    for path, value in sick["set"]:
        change(reply, path, value)
    return reply


def deployment(directory: Path, host: str, profile: str = "", changes: dict[str, Any] | None = None) -> Deployment:
    """The packaged inventory's host, or the H200 machine, with YAML over its profile."""
    init_workspace(directory)
    changes = changes or {}
    inventories = directory / "inventories"
    (inventories / "profiles" / "pair.yaml").write_text(PAIR, encoding="utf-8")
    (inventories / "h200.yaml").write_text(H200.replace("ARCH", changes.get("arch", "sm_90")), encoding="utf-8")
    (inventories / "profiles" / "over.yaml").write_text(f"extends: b8k4\n{profile}\n", encoding="utf-8")
    if "gpus" in changes:
        file = inventories / f"{host}.yaml"
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("[0, 1, 2, 3, 4, 5, 6, 7]", str(changes["gpus"])), encoding="utf-8")
    return resolve(load_workspace(directory), host, None, "over")


def healthy_case(directory: Path, name: str, profile: str = "") -> Case:
    return Case(deployment(directory, name, profile), host_facts(load("healthy", name)))


def sick_case(directory: Path, name: str) -> Case:
    sick = load("sick", name)
    made = deployment(directory, sick["of"], sick.get("profile", ""), sick.get("host"))
    return Case(made, host_facts(sick_reply(name)))
