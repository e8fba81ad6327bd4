"""benchmarks/gpu/pad: the pair in large matrices says what the pair says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.pad import PAIR, Shape, pad
from ddtree_ops.engine import measure

SHAPE = Shape(
    hidden=1024,
    intermediate=1000,
    heads=12,
    kv_heads=3,
    target_layers=8,
    draft_layers=4,
    vocabulary=2100,
    positions=2048,
)


def figures(pair: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Of AR, the chain and one tree, all equal to the pair's recorded text."""
    arguments = ["--pair", str(pair), "--rows", "4", "--max-new-tokens", "40", "--pairs", "16/4", "--json"]
    assert measure.main(arguments) == 0
    return list(json.loads(capsys.readouterr().out)["outcomes"])


def test_tokens_and_commit_lengths_are_the_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pad(PAIR, tmp_path / "large", SHAPE)
    capsys.readouterr()
    small, large = figures(PAIR, capsys), figures(tmp_path / "large", capsys)
    assert [one["rows_that_differ"] for one in large] == [0] * len(large)
    lengths = [[one["commit_length"] for one in outcomes if one["commit_length"]] for outcomes in (small, large)]
    assert len(lengths[0]) == 2 and lengths[1] == pytest.approx(lengths[0], rel=0.02)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 heads a KV head are fewer than the pair's 2"):
        pad(PAIR, tmp_path / "large", Shape(hidden=1024, heads=3, kv_heads=3))
