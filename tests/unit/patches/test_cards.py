"""tests/cards: Triton's compiler takes what a DDTREE server launches, on the cards of the inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cards import launches
from tests.cards.table import CARDS, TABLE, cells_of, compiled_for, digest, figures_in, lines_of, text_of

from . import inside_ddtree_steps
from .trees import Tree

pytestmark = pytest.mark.slow

COMPILED = ("sm_90", "sm_120")
"""The command takes all cards and head sizes; here the two that differ most, MLA and one ordinary head size."""


@pytest.mark.parametrize("card", COMPILED)
def test_the_kernels_compile_into_the_card_as_the_table_says(card: str, patched_site: Path, triton_site: Path) -> None:
    """The interpreter takes more than the compiler does. What did not change comes from the cache, as for the table."""
    compiler = Tree(card, patched_site, triton_site, compiled_for(card))
    try:
        lines = lines_of(card, compiler(launches.compiled, int(card.removeprefix("sm_")), "few"))
    finally:
        compiler.end()
    assert not [line for line in lines if line.too_large]
    assert {"_fwd_kernel", "_attend_share", "_merge_shares", "_write_cells", "_move_path"} < {x.kernel for x in lines}
    told = figures_in(TABLE.read_text())
    other = [line for line in lines if told.get((card, line.kernel, line.what, line.heads)) != line.figures]
    assert not other, "the kernels are others than the table's; write it anew: python -m tests.cards"


def test_the_table_is_of_these_kernels_and_nothing_in_it_is_too_large() -> None:
    text = TABLE.read_text()
    assert f"the digest {digest()}." in text, "write it anew: python -m tests.cards"
    told = figures_in(text)
    assert {card for card, *_ in told} == set(CARDS)
    assert not [where for where, cell in told.items() if cell.endswith("no")]
    for size in launches.SIZES:
        heads = "{}/{} {}".format(*size)
        assert all((card, "_fwd_kernel", "verify", heads) in told for card in CARDS)


def test_shared_memory_beyond_the_cards_is_said() -> None:
    """On sm_120 a Hopper tile does not fit, on sm_90 it does."""
    rows = [{"kernel": "k", "what": "verify", "heads": "", "registers": 9, "stack": 0, "shared": 106496, "warps": 4}]
    (hopper,), (blackwell,) = lines_of("sm_90", rows), lines_of("sm_120", rows)
    assert not hopper.too_large and blackwell.too_large
    told = figures_in(text_of(cells_of([hopper, blackwell]), "nothing"))
    assert told["sm_90", "k", "verify", ""] == "9 104" and told["sm_120", "k", "verify", ""] == "9 104 no"


def test_what_whole_steps_launch_is_in_the_table(interpreted: Tree) -> None:
    """All but the CPU's stand-in for a compiled kernel of SGLang's."""
    launched = set(interpreted(inside_ddtree_steps.launched))
    assert len(launched) > 5
    assert launched - {kernel for _, kernel, *_ in figures_in(TABLE.read_text())} == {
        "verify_tree_greedy_kernel_triton"
    }
