"""Makes releases: pinned wheels, one of them patched, and our own files, each known by its sha256."""

from .build import Release, build, release_id, untried_base
from .cache import Cache
from .choice import Target, engine_of
from .lock import locked_pythons
from .progress import Progress

__all__ = [
    "Cache",
    "Progress",
    "Release",
    "Target",
    "build",
    "engine_of",
    "locked_pythons",
    "release_id",
    "untried_base",
]
