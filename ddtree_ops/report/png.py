"""A chart's SVG as PNG, by resvg (the extra ``png``). Its letters are this machine's: other fonts, other bytes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ddtree_ops.errors import Failed, UsageError

#: resvg knows no ``sans-serif``, and leaves out text without a word where the family it takes for it is not there.
FAMILIES = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica")
ZOOM = 2
_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="sans-serif">{}</svg>'


def with_png(files: Mapping[str, str]) -> dict[str, str | bytes]:
    """The files of a report, and for each SVG a PNG of twice its size.

    Raises UsageError where the library is not installed, Failed where the machine has no font to draw with.
    """
    try:
        resvg = importlib.import_module("resvg_py")
    except ImportError:
        raise UsageError("--png: resvg-py is not installed here", hint="pip install 'ddtree-ops[png]'") from None
    family = _family(resvg)
    drawn = {
        name.removesuffix("svg") + "png": bytes(
            resvg.svg_to_bytes(svg_string=text, zoom=ZOOM, sans_serif_family=family)
        )
        for name, text in files.items()
        if name.endswith(".svg")
    }
    return {**files, **drawn}


def _family(resvg: Any) -> str:
    for family in FAMILIES:
        drawn, blank = (
            resvg.svg_to_bytes(svg_string=_PROBE.format(text), sans_serif_family=family)
            for text in ('<text x="2" y="15">x</text>', "")
        )
        if drawn != blank:
            return family
    raise Failed("--png: this machine has no font to draw with", hint=f"one of {', '.join(FAMILIES)}")
