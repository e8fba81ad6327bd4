"""What is planted where, and what of it cannot be seen, with the reason. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_ops.engine.faults import Fault


@dataclass(frozen=True)
class Shape:
    """How an engine speculates: ``budget`` and ``topk`` None for a chain; ``drafts`` False for AR."""

    budget: int | None = None
    topk: int | None = None
    drafts: bool = True

    def __str__(self) -> str:
        if not self.drafts:
            return "AR"
        return "chain" if self.budget is None else f"{self.budget}/{self.topk}"

    @property
    def algorithm(self) -> str:
        """As a profile names it."""
        return "none" if not self.drafts else "dflash" if self.budget is None else "ddtree"


AR = Shape(drafts=False)
CHAIN = Shape()
TREE = Shape(16, 4)
"""Where every fault is planted."""

HEALTHY = (
    AR,
    CHAIN,
    Shape(1, 1),
    Shape(7, 4),
    Shape(8, 4),
    TREE,
    Shape(48, 8),
    Shape(63, 8),
    Shape(64, 8),
    Shape(65, 8),
)
"""Where no fault is: the sweep's ends, and budgets at the edges (1, block_size - 1, and beside 64)."""

ELSEWHERE = (
    (Fault.MASK_ROWS_BY_BLOCK_SIZE, Shape(8, 4)),
    (Fault.MASK_ROWS_BY_BLOCK_SIZE, Shape(65, 8)),
    (Fault.STALE_KV, Shape(64, 8)),
    (Fault.LENIENT_ACCEPTANCE, CHAIN),
    (Fault.ROW_SPILL, Shape(63, 8)),
    (Fault.BUDGET_CLAMPED, Shape(8, 4)),
)
"""Faults planted at other shapes too: the one that this project began with, and those that depend on the width."""

HARMLESS = (
    (Fault.MASK_ROWS_BY_BLOCK_SIZE, Shape(7, 4), "W = budget + 1 = block_size, so the rows lie where they are read"),
    (Fault.MASK_OF_FIRST_REQUEST, CHAIN, "all chains have one mask"),
    (Fault.ROPE_BY_INDEX, CHAIN, "in a chain a node's index is its depth"),
    (Fault.STALE_KV, CHAIN, "a chain's accepted nodes lie in the slots after the prefix already"),
    (Fault.DRAFT_HIDDEN_OF_WRONG_NODE, CHAIN, "a chain's first nodes are its accepted ones"),
    (Fault.DUPLICATE_SIBLINGS, Shape(7, 1), "topk 1 has no second candidate"),
    (Fault.TOPK_IGNORED, Shape(7, 1), "topk is 1"),
    (Fault.BUDGET_CLAMPED, Shape(7, 4), "the budget is block_size - 1 already"),
)
"""Planted where the shape makes them the same computation: the gate must pass them."""

FLOAT32_ONLY: dict[Fault, str] = {
    Fault.DRAFT_HIDDEN_OF_WRONG_NODE: "changes verify steps only, and those are compared in float32: in 16 bits "
    "rounding changes them too",
    Fault.FILTER_ORDER: "moves the law by less than the distribution test can tell at this N; the same seeds show it",
}
"""Faults that only float32 shows, with the reason."""
