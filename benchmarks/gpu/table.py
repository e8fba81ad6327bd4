"""The README's table of DDTREE's speed, from results/gpu/ and from nothing else.

    python -m benchmarks.gpu.table        writes it into README.md

RATES is a run of ``tests/gpu/run --select speed``, PARTS what benchmarks/gpu/parts made of the traces of such runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.blocks import put

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results" / "gpu"
RATES, BLOCK = "run-14.json", "gpu"
NARROW, WIDE = "parts-12.json", "parts-14.json"
"""Traces of the servers with 8/4, and with 16/4 and a ladder."""
LOADS = (1, 8, 32, 64)
AR, CHAIN, TREE = "fast-ar", "fast-chain", "fast-ladder"


def rates(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """(server, C) -> tokens a second: the medians of the run's repeats."""
    found = {}
    for row in rows:
        concurrency, median, _ = row["case"].partition(", median of ")
        if median:
            found[row["server"], int(concurrency.removeprefix("C="))] = float(row["figures"]["tok_s"])
    return found


def commits(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """(server, C) -> committed tokens a step, of the last repeat."""
    return {
        (row["server"], int(row["case"].removeprefix("C="))): row["figures"]["commit_length"]
        for row in rows
        if row["case"].removeprefix("C=").isdecimal() and "commit_length" in row["figures"]
    }


def memory(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {row["server"]: row["figures"]["mib"] for row in rows if row["case"] == "memory after all rounds"}


def table(rows: list[dict[str, Any]], narrow: dict[str, Any], wide: dict[str, Any]) -> str:
    """Markdown: tokens a second, then each bound."""
    speed = rates(rows)
    lines = ["| requests in flight | AR tok/s | chain | DDTREE | of the better one |", "|---|---|---|---|---|"]
    for load in LOADS:
        ar, chain, tree = (speed[name, load] for name in (AR, CHAIN, TREE))
        lines.append(f"| {load} | {ar:,.0f} | {chain:,.0f} | {tree:,.0f} | {tree / max(ar, chain):.2f} |")
    lines += ["", "| what | measured | bound | |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {got} | {bound} | {'' if kept is None else 'kept' if kept else '**not kept**'} |"
        for what, got, bound, kept in bounds(rows, narrow, wide)
    ]
    return "\n".join(lines) + "\n"


def bounds(
    rows: list[dict[str, Any]], narrow: dict[str, Any], wide: dict[str, Any]
) -> Iterator[tuple[str, str, str, bool | None]]:
    """(what, measured, bound, whether it is kept, None where there is no bound)"""
    for width, name, found, bound in ((9, "fast-tree-8-4", narrow, 1.10), (17, TREE, wide, 1.15)):
        for context in (512, 8000):
            trace = f"{context}-c1"
            ratio = found[f"{name}-{trace}"]["verify"] / found[f"{AR}-{trace}"]["verify"]
            what = f"verify of {width} nodes beside AR's step, {context:,} tokens of context, C=1"
            yield what, f"{ratio:.2f}", f"at most {bound:.2f}", ratio <= bound
    for many in (1, 8, 32):
        one = wide[f"{TREE}-512-c{many}"]
        share = (one["build"] + one["commit"]) / one["step"]
        yield f"build and commit of a step, C={many}", f"{share:.1%}", "at most 5 %", share <= 0.05
    speed, length = rates(rows), commits(rows)
    for load in LOADS:
        faster = speed[TREE, load] / speed[CHAIN, load]
        longer = length[TREE, load] / length[CHAIN, load]
        what = f"tok/s beside the chain's, over commit length beside the chain's, C={load}"
        yield what, f"{faster:.2f} / {longer:.2f} = {faster / longer:.2f}", "at least 0.95", faster / longer >= 0.95
        most = speed[TREE, load] / max(speed[AR, load], speed[CHAIN, load])
        yield f"tok/s beside the better of AR and chain, C={load}", f"{most:.2f}", "at least 1.00", most >= 1.0
    had = memory(rows)
    more = had[TREE] / had[CHAIN]
    yield "memory of the server beside the chain's, after all rounds", f"{more:.3f}", "", None


def main() -> None:
    rows, narrow, wide = (json.loads((FOLDER / name).read_text()) for name in (RATES, NARROW, WIDE))
    put(ROOT / "README.md", BLOCK, table(rows["rows"], narrow, wide))


if __name__ == "__main__":
    main()
