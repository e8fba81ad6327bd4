"""A resolved profile as a generation keeps it."""

from __future__ import annotations

import msgspec

from ddtree_ops.errors import Failed
from ddtree_ops.model.types import Profile


def profile_to_json(profile: Profile) -> str:
    """Two-space JSON with sorted keys and a final newline; secrets by reference; no ``checks``, no ``evidence``."""
    profile = msgspec.structs.replace(profile, checks={}, evidence=None)
    return two_space_json(profile)


def two_space_json(value: object) -> str:
    """As ``json.dumps(..., ensure_ascii=False, indent=2, sort_keys=True)`` writes it, and a final newline."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode() + "\n"


def profile_from_json(text: str) -> Profile:
    """The profile of a generation's ``profile.json``. Raises Failed when it is not one that this version wrote."""
    try:
        return msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Failed(
            f"profile.json of the generation cannot be read: {error}",
            hint="it was written by another version of ddtree-ops; deploy again with this one",
        ) from error
