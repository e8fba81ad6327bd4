"""07-triton-pipeline-stage: the backend of a stage sizes its buffers by a layer that the stage holds."""

from __future__ import annotations

import pytest

from . import inside_pipeline
from .trees import Tree

EVEN: list[tuple[int, int, str | None]] = [(layers, size, None) for size in range(2, 9) for layers in (size, 36, 61)]
UNEVEN: list[tuple[int, int, str | None]] = [(36, 3, "10,10,16"), (61, 8, "5,8,8,8,8,8,8,8"), (7, 4, "4,1,1,1")]


def starts(layers: int, size: int, uneven: str | None) -> list[int]:
    """First layers by SGLang's rule: the last stages have one more, where it does not divide."""
    if uneven is None:
        counts = [layers // size + (rank >= size - layers % size) for rank in range(size)]
    else:
        counts = [int(count) for count in uneven.split(",")]
    return [sum(counts[:rank]) for rank in range(size)]


@pytest.mark.parametrize(("layers", "size", "uneven"), EVEN + UNEVEN)
def test_each_stage_reads_its_first_layer(layers: int, size: int, uneven: str | None, patched: Tree) -> None:
    own = [100 + start for start in starts(layers, size, uneven)]
    assert patched(inside_pipeline.v_head_dims, layers, size, uneven) == own
    assert patched(inside_pipeline.swa_v_head_dims, layers, size, uneven, 6) == own
    assert patched(inside_pipeline.mla_v_head_dims, layers, size, uneven) == [32] * size


def test_stock_reads_other_layers_or_ends(stock: Tree) -> None:
    assert stock(inside_pipeline.v_head_dims, 36, 2, None) == [100, 118]
    three = stock(inside_pipeline.v_head_dims, 36, 3, None)
    assert three == [100, 112, "IndexError"]
    uneven = stock(inside_pipeline.v_head_dims, 7, 4, "4,1,1,1")
    assert uneven == [100, "IndexError", "IndexError", "IndexError"]
    assert stock(inside_pipeline.swa_v_head_dims, 36, 3, None, 6) == [100, "KeyError", "KeyError"]
    assert stock(inside_pipeline.mla_v_head_dims, 61, 4, None) == [32, 32, "IndexError", "IndexError"]
