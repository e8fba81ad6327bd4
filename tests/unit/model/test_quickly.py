"""What libyaml reads is what PyYAML reads, line for line, or it is left to PyYAML."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.data import data_dir
from ddtree_ops.errors import UsageError
from ddtree_ops.model import yamlfile
from ddtree_ops.model.yamlfile import Node, _convert, _Loader, _quickly

pytestmark = pytest.mark.skipif(not yaml.__with_libyaml__, reason="this PyYAML is without libyaml")
TOKENS = st.sampled_from(
    [
        *(
            "a",
            "b: ",
            "key:",
            ": ",
            "- ",
            "-",
            "  ",
            " ",
            "\n",
            "\n  ",
            "\n    ",
            "\n- ",
            "{",
            "}",
            "[",
            "]",
            ", ",
            ",",
        ),
        *(
            "'",
            '"',
            "# note",
            " #",
            "#",
            "no",
            "true",
            "~",
            "null",
            "010",
            "1:30",
            "1.5",
            ".inf",
            "0x1F",
            "1e3",
            "=",
            "<<",
        ),
        *(
            "2026-11-30",
            "&x ",
            "*x",
            "!t ",
            "!!str ",
            "? ",
            "@",
            "`",
            "---",
            "...",
            "?",
            "b16k4",
            "/srv/m:x",
            "a: b: c",
        ),
        *("|", ">", "%", "\\", "\t", "\u00e9"),
    ]
)


def by(text: str, *, quick: bool) -> Node | str | None:
    """The tree; "refused" for what is refused; None for what is left to the other."""
    try:
        root = _quickly(text, "f") if quick else _Loader(text, "f").get_single_node()
        return None if root is None else _convert(root, "f", "", root.start_mark.line + 1)
    except (yaml.YAMLError, UsageError, ValueError):
        return "refused"


@settings(max_examples=1500, deadline=None)
@given(st.lists(TOKENS, max_size=25).map("".join))
def test_both_read_the_same(text: str) -> None:
    found = by(text, quick=True)
    assert found is None or found == by(text, quick=False)


def test_the_packaged_files_are_read_by_libyaml() -> None:
    """Else this would be for nothing."""
    files = [*Path(data_dir("inventories")).rglob("*.yaml")]
    quick = [by(file.read_text(), quick=True) for file in files]
    assert sum(isinstance(found, Node) for found in quick) > len(files) * 0.7
    for file, found in zip(files, quick, strict=True):
        assert found is None or found == by(file.read_text(), quick=False)


def test_without_libyaml_all_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamlfile, "_Quick", None)
    assert by("a: 1", quick=True) is None and isinstance(by("a: 1", quick=False), Node)
