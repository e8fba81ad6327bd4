from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .box import Box, box_in


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with box_in(tmp_path / "ddtree") as made:
        yield made
