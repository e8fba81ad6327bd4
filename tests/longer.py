"""Parameters that show at one more size what their neighbours show already: they run with ``LONG=1``."""

from __future__ import annotations

from typing import Any

import pytest


def longer(*values: object) -> Any:
    """One set of a test's parameters, left out unless what takes long was asked for."""
    return pytest.param(*values, marks=pytest.mark.long)
