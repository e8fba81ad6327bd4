"""On which base a test runs: on the one that is deployed, where nothing is said."""

from __future__ import annotations

import pytest

from .trees import BASE

NEWEST = "sglang-0.5.23"
BASES = (BASE, NEWEST)

every_base = pytest.mark.parametrize("base", BASES, indirect=True)
newest = pytest.mark.parametrize("base", [NEWEST], indirect=True)
