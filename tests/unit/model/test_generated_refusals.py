"""Every key of every kind of file, with values that cannot be meant there: file, line, key and what is allowed.

The keys are those of the reference, so a new one is tried without a word here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.errors import UsageError
from ddtree_ops.model import init_workspace, load_workspace, meanings
from ddtree_ops.model.reference import MINIMAL, _put

WRONG: dict[str, Any] = {
    "mapping": {"no-such-key": 1},
    "list": [{"no": "such"}],
    "text": "?!\t",
    "negative": -1,
    "huge": 10**30,
    "fraction": 0.123456,
    "date": yaml.safe_load("2026-11-30"),
    "null": None,
}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "profile": ("profiles/b8k4.yaml", {"algorithm": "ddtree", "budget": 8, "topk": 4}, meanings.PROFILE),
    "host": ("ct200.yaml", MINIMAL, meanings.HOST),
    "workspace": ("workspace.yaml", {}, meanings.WORKSPACE),
}
PLACES = [(kind, path) for kind, (_, _, keys) in FILES.items() for path in keys]


def refusal(place: Path, kind: str, path: str, value: Any) -> str | None:
    """What is said of a workspace with that value in that place; None when it is taken."""
    file, document, _ = FILES[kind]
    written = yaml.safe_dump(_put(document, path.replace("NAME", "name"), value), sort_keys=False)
    (place / "inventories" / file).write_text(written)
    try:
        load_workspace(place)
    except UsageError as error:
        return error.message
    return None


@pytest.mark.parametrize(("kind", "path"), PLACES, ids=lambda word: word)
def test_what_cannot_be_meant_in_a_place_is_refused_with_it(tmp_path: Path, kind: str, path: str) -> None:
    init_workspace(tmp_path)
    said = {name: refusal(tmp_path, kind, path, value) for name, value in WRONG.items()}
    refused = [one for one in said.values() if one is not None]
    assert len(refused) >= 3, said
    for one in refused:
        assert re.match(r"inventories/[\w/.-]+:\d+: ", one), one
        assert re.search(r"; allowed: |unknown key|looks like a secret", one) and "object at 0x" not in one, one


def test_they_are_more_than_two_hundred() -> None:
    assert 3 * len(PLACES) > 200
