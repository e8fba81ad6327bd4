"""The host's half. `ddtree_host.py` is one standard-library file that runs on hosts; nothing here imports it."""

from __future__ import annotations

import hashlib
from importlib import resources


def source() -> str:
    """The text of ``ddtree_host.py``, from a checkout or an installed wheel."""
    return resources.files(__name__).joinpath("ddtree_host.py").read_text(encoding="utf-8")


def sha256() -> str:
    """Hex sha256 of the source: what ``probe`` answers as ``agent_sha256`` once it is installed."""
    return hashlib.sha256(source().encode()).hexdigest()
