"""One fleet for all tests of this directory: what is deployed takes longer than what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddtree_ops.model import Workspace

from .fleet import fleet


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with fleet(tmp_path_factory.mktemp("fleet")) as workspace:
        yield workspace
