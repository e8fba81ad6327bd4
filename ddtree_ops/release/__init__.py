"""Makes releases: pinned wheels and our own files, each known by its sha256, the whole by a hash of everything."""

from .build import Progress, Release, build, release_id
from .cache import Cache

__all__ = ["Cache", "Progress", "Release", "build", "release_id"]
