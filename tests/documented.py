"""A command's ``--json`` document, read and held to what docs/json.md says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ddtree_ops.cli.documents import ROWS, WHOLE, faults


def command_of(words: Sequence[str]) -> str:
    """Which document a command line asks for."""
    for told in (f"{words[0]} {words[1]}" if len(words) > 1 else "", *(f"{words[0]} {word}" for word in words[1:])):
        if told in WHOLE:
            return told
    assert words[0] in ROWS or words[0] in WHOLE, words
    return words[0]


def documented(words: Sequence[str], stdout: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(stdout)
    # a command that there is none of has a refusal all the same
    assert faults("" if "error" in document else command_of(words), document) == [], words
    return document
