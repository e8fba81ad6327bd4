"""Inside a tree's Python: faults of tests/gpu/faults in the modules that are running."""

from __future__ import annotations

import importlib
import linecache
import sys
from pathlib import Path
from typing import Any


def plant(patch: str) -> Any:
    """Run the changed text of overlay modules in their place, as a server of the patched tree would; how to undo it."""
    from ddtree_ops.release.udiff import apply_diff, parse_diff, split_patch

    undo: list[_Names] = []
    for diff in parse_diff(split_patch(Path(patch).read_bytes())[1], Path(patch).name):
        module = importlib.import_module(diff.path.removesuffix(".py").replace("/", "."))
        changed = apply_diff(diff, Path(str(module.__file__)).read_bytes(), Path(patch).name).decode()
        undo += _run_instead(module, changed, f"<{Path(patch).name}>")
    return lambda: _restore(undo)


def plant_words(name: str, changes: list[tuple[str, str]]) -> Any:
    """The same for words of one overlay module, each there once, that become others."""
    module = importlib.import_module(f"sglang.srt.speculative.{name}")
    text = Path(str(module.__file__)).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    undo = _run_instead(module, text, f"<{name}, changed>")
    return lambda: _restore(undo)


_Names = tuple[Any, dict[str, Any]]
"""A module, and what some of its names stood for."""


def _run_instead(module: Any, text: str, place: str) -> list[_Names]:
    # Triton reads the source of what it interprets.
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    before = dict(vars(module))
    undo: list[_Names] = [(module, before)]
    exec(compile(text, place, "exec"), vars(module))
    # Whoever has imported a function from there has the old one.
    for other in [m for name, m in sys.modules.items() if name.startswith("sglang.srt.speculative.ddtree_")]:
        names = {n: v for n, v in vars(other).items() if n in before and v is before[n] and other is not module}
        undo.append((other, names))
        vars(other).update({name: vars(module)[name] for name in names})
    return undo


def _restore(undo: list[_Names]) -> None:
    for module, names in reversed(undo):
        vars(module).update(names)
