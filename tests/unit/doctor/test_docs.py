"""docs/doctor.md is what the table of checks and the arch rules say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.doctor.active import ACTIVE
from ddtree_ops.doctor.check import CHECKS
from ddtree_ops.doctor.table import document, rows
from ddtree_ops.model.archs import arch_table

DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_the_document_is_up_to_date() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert document(text) == text, "python -m ddtree_ops.doctor.table docs/doctor.md"


def test_it_names_every_check_and_rule() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in (*CHECKS, *ACTIVE, *(rule.id for rule in arch_table().rules)):
        assert f"| `{name}` |" in text
    assert len(rows()) == len(CHECKS) + len(ACTIVE)


def test_a_document_without_its_places_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for checks"):
        document("# nothing\n")
