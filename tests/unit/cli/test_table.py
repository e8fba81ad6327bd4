"""The plain table is rich's, character for character, or it is left to rich."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddtree_ops.cli.table import blocks, draw

COLUMNS = ["host", "state", "generation"]
ROWS = [["ct200", "active", "12"], ["a-host-of-a-longer-name", "", "3"]]


def by_rich(columns: list[str], rows: list[list[str]], right: list[bool], *, width: int, bold: bool) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=bold,
        color_system="standard" if bold else None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    table = Table()
    for column, flush in zip(columns, right, strict=True):
        table.add_column(Text(column), justify="right" if flush else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    # rich begins and ends bold for each part of a cell; a terminal shows the same
    return console.file.getvalue().replace("\x1b[0m\x1b[1m", "").rstrip("\n")


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], []])
@pytest.mark.parametrize("bold", [False, True])
def test_it_is_drawn_as_rich_draws_it(monkeypatch: pytest.MonkeyPatch, rows: list[list[str]], bold: bool) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    right = [False, False, bool(rows)]
    assert draw(COLUMNS, rows, right, bold=bold) == by_rich(COLUMNS, rows, right, width=70, bold=bold)


def test_it_fits_exactly_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [False, False, True]
    drawn = by_rich(COLUMNS, ROWS, right, width=200, bold=False)
    needed = len(drawn.splitlines()[0])
    for width, wanted in ((needed, drawn), (needed - 1, None)):
        monkeypatch.setenv("COLUMNS", str(width))
        assert draw(COLUMNS, ROWS, right, bold=False) == wanted


@pytest.mark.parametrize("text", ["naïve", "two\nlines", "a\ttab", "\x1b[31m"])
def test_what_is_not_plain_is_left_to_rich(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert draw(["a"], [[text]], [False], bold=False) is None


STATUS = [
    "host",
    "service",
    "state",
    "since",
    "generation",
    "release",
    "profile",
    "budget/topk",
    "accept length",
    "verdict",
]
SEEN = [
    "ct200",
    "sglang-k26-ddtree",
    "active",
    "2026-11-30 22:31:10",
    "12",
    "304d18f700cb",
    "b16k4",
    "16/4",
    "",
    "UNPROVEN",
]


def test_where_a_table_would_break_words_its_rows_come_one_below_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    drawn = blocks(STATUS, [SEEN, SEEN])
    assert drawn is not None and drawn.count("\n\n") == 1
    lines = drawn.splitlines()
    assert "      service  sglang-k26-ddtree" in lines and "      verdict  UNPROVEN" in lines
    assert not any("accept length" in line for line in lines)  # it has nothing to say
    monkeypatch.setenv("COLUMNS", "200")
    assert blocks(STATUS, [SEEN]) is None


def test_a_table_whose_texts_only_have_to_be_folded_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert blocks(["topic", "what it is"], [["operating", "the first host, upgrades, a failed gate at 3 a.m."]]) is None
