"""Shared by the tests of deploying: a service of the packaged inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.model import Deployment, init_workspace, load_workspace, resolve


@pytest.fixture
def ct200(tmp_path: Path) -> Deployment:
    init_workspace(tmp_path)
    return resolve(load_workspace(tmp_path), "ct200", None, None)
