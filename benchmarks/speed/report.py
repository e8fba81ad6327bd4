"""benchmarks/results.json and the README's table, which is made from it and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.blocks import put

from .rows import Row
from .timing import Measured, ratio
from .venvs import CHECKOUT

RESULTS = CHECKOUT / "benchmarks/results.json"


def told(row: Row, found: Mapping[str, Measured], context: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it is kept: everybody's seconds, and ours as a ratio to each of the others."""
    ours = found[row.ours.name]
    ratios = {}
    for other in row.theirs:
        low, middle, high = ratio(ours, found[other.name])
        bound = row.bounds.get(other.name)
        ratios[other.name] = {"ratio": middle, "least": low, "most": high, "bound": bound}
    return {
        "what": row.what,
        "ours": row.ours.name,
        "seconds": {name: measured.as_json() for name, measured in found.items()},
        "ratios": ratios,
        "context": dict(context),
    }


def keep(name: str, row: dict[str, Any]) -> None:
    """Put a row into results.json in place of its former self, and draw the README's table anew."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[name] = _rounded(row)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    put(CHECKOUT / "README.md", "benchmarks", table(kept))


def table(kept: Mapping[str, Any]) -> str:
    """Markdown: a line for each ratio, medians of the rounds with the least and the most."""
    lines = ["| what | beside | ratio (least to most) | bound | |", "|---|---|---|---|---|"]
    for row in kept.values():
        for other, said in row["ratios"].items():
            bound = said["bound"]
            verdict = "" if bound is None else "kept" if said["ratio"] <= bound else "**not kept**"
            spread = f"{said['ratio']:.2f} ({said['least']:.2f} to {said['most']:.2f})"
            lines.append(
                f"| {row['what']} | {other} | {spread} | {'' if bound is None else f'{bound:.2f}'} | {verdict} |"
            )
    return "\n".join(lines) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
