"""A dozen rows of the fault matrix, one of each sort; ``make fault-matrix`` runs them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import Lab
from .matrix.all import every_row
from .matrix.row import Row, run_row
from .matrix.world import World


@pytest.fixture(scope="module")
def world(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A host of their own: each row begins where the one before ended."""
    host = lab.host("matrix")
    yield World(host, tmp_path_factory.mktemp("matrix") / "ws")
    host.down()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("row", [row for row in every_row() if row.short], ids=lambda row: row.name)
def test_a_row_ends_as_declared(world: World, row: Row) -> None:
    result = run_row(row, world)
    assert result.ended, result.why
    assert result.strays == []
