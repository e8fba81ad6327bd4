"""Where the packaged files that are no code are, in a checkout and in an installed wheel."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

Kind = Literal["templates", "inventories", "patches", "docs"]


@functools.cache
def data_dir(kind: Kind) -> Path:
    """The directory of that kind: ``ddtree_ops/_data/<kind>`` of a wheel, else the checkout's top level.

    Raises FileNotFoundError when neither exists, which means a broken installation.
    """
    package = Path(__file__).parent
    for candidate in (package / "_data" / kind, package.parent / kind):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"ddtree-ops is installed without its {kind}/ (looked beside {package})")
