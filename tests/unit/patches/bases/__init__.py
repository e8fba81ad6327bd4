"""What a server's stand-ins are made of, in the shape of each SGLang that the series is for: a module for each.

All of them have the same functions; which one it is, the SGLang that was imported says.
"""

from __future__ import annotations

import importlib
from typing import Any


def here() -> Any:
    """The module of this Python's SGLang."""
    version = importlib.import_module("sglang._version").__version__
    return importlib.import_module(f"{__name__}.v{version.replace('.', '_')}")
