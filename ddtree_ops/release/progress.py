"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

#: progress(what, done, total), in one unit.
Progress = Callable[[str, int, int], None]
