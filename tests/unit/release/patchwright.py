"""Small patch series, sound or not."""

from __future__ import annotations

import difflib
from pathlib import Path

HEADER = "Why: the stock engine does not\nWhat: it does now\nTests: tests/unit/release\nUpstream: none\n"
STOCK = {
    "pkg/__init__.py": b"",
    "pkg/f.py": b"".join(b"f%d = %d\n" % (n, n) for n in range(1, 21)),
    "pkg/g.py": b"g = 1\nh = 2\n",
}


def make_patch(changes: dict[str, tuple[bytes, bytes]], header: str = HEADER) -> bytes:
    """``changes``: path -> (old, new)."""
    text = header
    for path, (old, new) in changes.items():
        lines = [content.decode().splitlines(keepends=True) for content in (old, new)]
        text += "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}"))
    return text.encode()


F1 = STOCK["pkg/f.py"].replace(b"f2 = 2\n", b"f2 = 22\n")
F2 = F1.replace(b"f9 = 9\n", b"f9 = 99\nnew = 1\n")
G2 = STOCK["pkg/g.py"].replace(b"h = 2\n", b"h = 3\n")
PATCHES = {
    "0001-first.patch": make_patch({"pkg/f.py": (STOCK["pkg/f.py"], F1)}),
    "0002-second.patch": make_patch({"pkg/f.py": (F1, F2), "pkg/g.py": (STOCK["pkg/g.py"], G2)}),
}
OVERLAY = {"pkg/sub/new.py": b"value = 5\n"}


def write_series(
    directory: Path, patches: dict[str, bytes] | None = None, overlay: dict[str, bytes] | None = None
) -> Path:
    """``patches/<base>/`` with a comment in its series; by default two patches and one new file."""
    patches = PATCHES if patches is None else patches
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "series").write_text("# the order matters\n" + "".join(f"{name}\n" for name in patches))
    for name, content in patches.items():
        (directory / name).write_bytes(content)
    for path, content in (OVERLAY if overlay is None else overlay).items():
        (directory / "overlay" / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / "overlay" / path).write_bytes(content)
    return directory
