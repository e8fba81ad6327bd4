"""The table of compiled kernels: written by python -m tests.cards, read by its test."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_ops.data import data_dir
from ddtree_ops.model.archs import arch_table
from ddtree_ops.release.cache import Cache
from ddtree_ops.release.lock import load_lock
from tests.unit.patches.trees import BASE, ROOT

CARDS = tuple(arch_table().archs)
TABLE = ROOT / "results" / "cards" / "kernels.txt"
OVERLAY = data_dir("patches") / BASE / "overlay" / "sglang" / "srt" / "speculative"
LAUNCHES = ROOT / "tests" / "cards" / "launches.py"
SOURCES = (
    LAUNCHES,
    *(OVERLAY / f"ddtree_{name}.py" for name in ("attention", "build", "candidates", "mask", "verify")),
)
"""What the table is made from, beside the locked SGLang and Triton: DDTREE's kernels, and what is launched of them and
of SGLang's."""
HEAD = """$ python -m tests.cards
{base} as patched here, Triton {triton}; the kernels and their launches have the digest {sources}.
Compiled ahead of time by the locked wheel's own ptxas; nothing here was run. registers: of one thread, 255 at most;
stack: its bytes in local memory, where spilled registers go; shared: KiB of a program; "no": more than the card has
({limits}). A cell: registers+stack shared.
"""


@dataclass(frozen=True)
class Line:
    """One kernel of one step and head size, on one card."""

    card: str
    kernel: str
    what: str
    heads: str
    registers: int
    stack: int
    shared: int
    warps: int

    @property
    def too_large(self) -> bool:
        return self.shared > 1024 * arch_table().archs[self.card].shared_memory_kib

    @property
    def figures(self) -> str:
        stack = f"+{self.stack}" if self.stack else ""
        return f"{self.registers}{stack} {self.shared / 1024:.0f}{' no' if self.too_large else ''}"


def lines_of(card: str, rows: list[dict[str, Any]]) -> list[Line]:
    """From `launches.compiled`; of several sets of constants the one that takes the most shared memory."""
    names = ("kernel", "what", "heads", "registers", "stack", "shared", "warps")
    found: dict[tuple[str, ...], Line] = {}
    for row in rows:
        line = Line(card, **{name: row[name] for name in names})
        key = (line.kernel, line.what, line.heads)
        before = found.get(key)
        if before is None or (line.shared, line.registers) > (before.shared, before.registers):
            found[key] = line
    return list(found.values())


def compiled_for(card: str) -> Path:
    """Where Triton keeps what it compiled for a card, by source and options."""
    return Cache().directory / "cards" / card


def digest() -> str:
    """Of what the table is made from; comments and docstrings make no difference."""
    whole = hashlib.sha256(f"{BASE} {_triton()}".encode())
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
        whole.update(ast.dump(tree).encode())
    return whole.hexdigest()[:16]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _triton() -> str:
    return next(pin.version for pin in load_lock(BASE, "3.12").pins if pin.name == "triton")


def cells_of(lines: list[Line]) -> dict[tuple[str, str, str, str], str]:
    """(card, kernel, step, heads) -> the cell."""
    return {(line.card, line.kernel, line.what, line.heads): line.figures for line in lines}


def text_of(cells: dict[tuple[str, str, str, str], str], made_from: str) -> str:
    """The file. made_from: `digest`."""
    keys = dict.fromkeys(where[1:] for where in cells)
    head = ["kernel", "step", "heads", *CARDS]
    body = [
        [kernel, what, heads or "-", *(cells.get((c, kernel, what, heads), "-") for c in CARDS)]
        for kernel, what, heads in keys
    ]
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    rows = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *body]]
    limits = ", ".join(f"{card} {arch.shared_memory_kib}" for card, arch in arch_table().archs.items())
    words = HEAD.format(base=BASE, triton=_triton(), sources=made_from, limits=limits)
    return words + "\n" + "\n".join("  ".join(row).rstrip() for row in rows) + "\n"


def figures_in(text: str) -> dict[tuple[str, str, str, str], str]:
    """`cells_of` from what `text_of` wrote."""
    cells = [re.split(r" {2,}", row) for row in text.partition("\n\n")[2].splitlines()]
    _, _, _, *cards = cells[0]
    return {
        (card, row[0], row[1], "" if row[2] == "-" else row[2]): cell
        for row in cells[1:]
        for card, cell in zip(cards, row[3:], strict=True)
        if cell != "-"
    }
