"""Faults that can be planted on purpose, to show that the exactness gate catches them. Never on by default."""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """A planted fault; the text in FAULTS says what breaks and when it has no effect."""

    MASK_ROWS_BY_BLOCK_SIZE = "mask-rows-by-block-size"
    ROPE_BY_INDEX = "rope-by-index"


FAULTS: dict[Fault, str] = {
    Fault.MASK_ROWS_BY_BLOCK_SIZE: "mask rows are written block_size apart, read W apart; harmless if W == block_size",
    Fault.ROPE_BY_INDEX: "tree nodes sit at RoPE position L + node index, not L + depth; harmless in a chain",
}
