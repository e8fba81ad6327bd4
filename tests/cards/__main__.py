"""python -m tests.cards [--jobs N]: compiles for every card and writes results/cards/kernels.txt.

Needs the locked SGLang and Triton wheels (from the cache, or by pip) and no card. From nothing it takes a core about
ten minutes a card; what is compiled stays in the cache, so that a second run takes what has changed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cards import launches
from tests.cards.table import CARDS, TABLE, Line, cells_of, compiled_for, digest, lines_of, text_of
from tests.unit.patches.trees import Tree, patched_tree, stock_tree, triton_tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="cards at a time, a process each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddtree-cards-") as scratch:
        for name in ("stock", "triton"):
            Path(scratch, name).mkdir()
        site = patched_tree(stock_tree(Path(scratch, "stock")), Path(scratch, "patched"))
        triton = triton_tree(Path(scratch, "triton"))

        def compiled(card: str) -> list[Line]:
            tree = Tree(card, site, triton, compiled_for(card))
            rows = tree(launches.compiled, int(card.removeprefix("sm_")), "all")
            tree.end()
            print(f"{card}: {len(rows)} kernels", file=sys.stderr, flush=True)
            return lines_of(card, rows)

        with ThreadPoolExecutor(args.jobs) as pool:
            lines = [line for found in pool.map(compiled, CARDS) for line in found]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(text_of(cells_of(lines), digest()))
    too_large = [line for line in lines if line.too_large]
    for line in too_large:
        print(f"more shared memory than {line.card} has: {line}", file=sys.stderr)
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
