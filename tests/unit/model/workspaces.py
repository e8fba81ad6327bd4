"""Small real workspaces for tests: the packaged profiles, and a host per test."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddtree_ops.data import data_dir
from ddtree_ops.model import Deployment, load_workspace, resolve

HOST = """\
address: 192.0.2.7
root: /opt/ddtree
gpus:
  count: 8
  name: RTX PRO 6000 Blackwell
  arch: sm_120
  memory_gib: 96
  interconnect: pcie
services:
  one:
    base: tiny
    profile: b8k4
    port: 30000
    gpus: [0, 1]
"""


def make(directory: Path, files: dict[str, str] | None = None, *, host: str = HOST) -> Path:
    """A workspace with the packaged profiles, the host ``h`` and the given files (paths relative to inventories/)."""
    inventories = directory / "inventories"
    shutil.copytree(data_dir("inventories") / "profiles", inventories / "profiles")
    (inventories / "h.yaml").write_text(host, encoding="utf-8")
    for path, text in (files or {}).items():
        (inventories / path).write_text(text, encoding="utf-8")
    return directory


def deployment(directory: Path, extra: str = "", *, base: str = "tiny", profile: str = "b8k4") -> Deployment:
    """The host's only service, its profile followed by the YAML ``extra``."""
    over = f"extends: {profile}\n{extra}"
    workspace = make(directory, {"profiles/over.yaml": over}, host=HOST.replace("base: tiny", f"base: {base}"))
    return resolve(load_workspace(workspace), "h", None, "over")
