"""benchmarks/gpu/table: the README's figures are those of the results, and a bound that is not kept says so."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks.blocks import block, put
from benchmarks.gpu import upstream
from benchmarks.gpu.table import BLOCK, FOLDER, NARROW, RATES, ROOT, WIDE, table

ROWS, EIGHT, SIXTEEN = (json.loads((FOLDER / name).read_text()) for name in (RATES, NARROW, WIDE))


def test_the_readme_shows_what_was_measured() -> None:
    assert block(ROOT / "README.md", BLOCK) == table(ROWS["rows"], EIGHT, SIXTEEN)


def test_the_page_for_reviewers_is_what_the_series_and_the_results_say() -> None:
    assert upstream.PAGE.read_text() == upstream.page()


def test_a_bound_that_is_not_kept_says_so() -> None:
    slower = copy.deepcopy(SIXTEEN)
    slower["fast-ladder-512-c1"]["verify"] *= 1.2
    (line,) = (line for line in table(ROWS["rows"], EIGHT, slower).splitlines() if "not kept" in line)
    assert "17 nodes" in line and "512 tokens" in line


def test_a_file_without_the_block_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("x\n<!-- gpu: begin -->\nold\n")
    with pytest.raises(ValueError, match="no block"):
        put(file, "gpu", "new\n")
    assert "old" in file.read_text()
