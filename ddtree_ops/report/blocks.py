"""A report as blocks, and the two ways to write them: Markdown and HTML. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple, TypeAlias


class Heading(NamedTuple):
    """``level`` 1 is the report's title."""

    level: int
    text: str


class Text(NamedTuple):
    """A paragraph."""

    text: str


class Items(NamedTuple):
    """A list of sentences."""

    items: Sequence[str]


class Table(NamedTuple):
    """``rows`` as strings, one per column; ``note`` stands under it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Figure(NamedTuple):
    """``name`` is the file's, without its ending; ``title`` says what it shows."""

    name: str
    title: str
    svg: str


class Code(NamedTuple):
    """Lines to copy."""

    text: str


Block: TypeAlias = Heading | Text | Items | Table | Figure | Code


def markdown(blocks: Sequence[Block]) -> str:
    """GitHub's Markdown; figures as files beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Items(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Table(columns, rows, note):
            lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (columns, *rows)]
            lines.insert(1, "|" + "|".join("---:" if _numeric(rows, i) else "---" for i in range(len(columns))) + "|")
            return "\n".join([*lines, *(["", _plain(note)] if note else [])])
        case Figure(name, title, _):
            return f"![{_plain(title)}]({name}.svg)"
        case Code(text):
            # A fence longer than any in the text cannot be closed by it.
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"


def _plain(text: str) -> str:
    """Text in which nothing of a host's words is taken for markup."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", clean)


def _cell(text: str) -> str:
    return _plain(text) or " "


def _numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    return bool(rows) and all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)


_STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --faint: #5b6570; --line: #d5dae0; --soft: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } h3 { font-size: 1.05rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; }
p.note { color: var(--faint); font-size: .9rem; margin: .3rem 0 0; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--faint); font-size: .9rem; }
@media print { body { max-width: none; } pre, .scroll { overflow: visible; } }
"""


def html(title: str, blocks: Sequence[Block]) -> str:
    """One page that needs nothing else: no script, no font, no request."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Items(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Table(columns, rows, note):
            kinds = [' class="n"' if _numeric(rows, i) else "" for i in range(len(columns))]
            head = "".join(f'<th scope="col"{k}>{escape(c)}</th>' for k, c in zip(kinds, columns, strict=True))
            lines = [
                "<tr>" + "".join(f"<td{k}>{escape(c)}</td>" for k, c in zip(kinds, row, strict=True)) + "</tr>"
                for row in rows
            ]
            said = f'\n<p class="note">{escape(note)}</p>' if note else ""
            inner = f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>"
            return f'<div class="scroll"><table>\n{inner}\n</table></div>{said}'
        case Figure(_, title, svg):
            return f"<figure>{svg}<figcaption>{escape(title)}</figcaption></figure>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
