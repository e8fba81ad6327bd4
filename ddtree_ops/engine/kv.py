"""KV memory: one pool of slots for each model, and one table that says which slots each request owns.

Target and drafter share slot numbers, as in SGLang. Slot 0 belongs to nobody: it is what padding points at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import ModelConfig


class KVPool:
    """Keys and values of one model: [layer, slot, 2 * kv_head, head_dim], keys first, K already rotated."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype) -> None:
        self._heads = config.num_kv_heads
        self._data = torch.zeros(config.num_layers, slots, 2 * config.num_kv_heads, config.head_dim, dtype=dtype)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store kv [rows, 2 * kv_heads, head_dim] at int64 slots [rows]."""
        self._data[layer].index_copy_(0, slots, kv)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values), each [batch, kv_heads, columns, head_dim], of int64 slots [batch, columns]."""
        flat = self._data[layer].index_select(0, slots.reshape(-1))
        both = flat.view(*slots.shape, 2 * self._heads, -1).transpose(1, 2)
        return both[:, : self._heads], both[:, self._heads :]

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy slots [n] to slots [n] in every layer; ranges may overlap (all is read before anything is written)."""
        self._data.index_copy_(1, destination, self._data.index_select(1, source))


class SlotTable:
    """Rows of slots, one a running request: column t holds the slot of the token at position t, then the reserve.

    A request's slots are taken when it joins, for its whole life and the widest verify, so that it can never run
    out halfway. `columns` bounds prompt + output + reserve of one request.
    """

    def __init__(self, rows: int, columns: int, slots: int) -> None:
        self.columns = columns
        self.slots = slots - 1
        self._table = torch.zeros(rows, columns, dtype=torch.int64)
        self._free_rows = list(range(rows - 1, -1, -1))
        self._free_slots = list(range(slots - 1, 0, -1))
        self._owned: dict[int, set[int]] = {}

    @property
    def free(self) -> int:
        """Slots that neither a request nor the cache owns."""
        return len(self._free_slots)

    @property
    def has_row(self) -> bool:
        """Whether one more request has a row."""
        return bool(self._free_rows)

    def allocate(self, count: int, shared: Sequence[int] = ()) -> int | None:
        """A row of `count` slots, or None while there is no room. Raises ValueError if it can never fit.

        shared: slots to begin with that the row only borrows.
        """
        if count > min(self.columns, self.slots):
            raise ValueError(f"{count} slots asked, a row holds {self.columns} of {self.slots}")
        own = count - len(shared)
        if not self._free_rows or own > len(self._free_slots):
            return None
        row = self._free_rows.pop()
        taken = self._free_slots[len(self._free_slots) - own :]
        del self._free_slots[len(self._free_slots) - own :]
        self._owned[row] = set(taken)
        self._table[row].zero_()
        self._table[row, :count] = torch.tensor([*shared, *taken], dtype=torch.int64)
        return row

    def disown(self, row: int, start: int, stop: int) -> list[int]:
        """Slots of positions start..stop-1, which the row borrows from now on. Raises KeyError unless it owns them."""
        slots: list[int] = self._table[row, start:stop].tolist()
        for slot in slots:
            self._owned[row].remove(slot)
        return slots

    def reclaim(self, slots: Sequence[int]) -> None:
        """Take back slots that were disowned and that nobody borrows any more."""
        self._free_slots.extend(slots)

    def release(self, row: int) -> None:
        """Give a row and its own slots back. Raises KeyError when it is not owned (a double free)."""
        self._free_slots.extend(self._owned.pop(row))
        self._free_rows.append(row)

    def prefix(self, rows: Tensor, columns: int) -> Tensor:
        """Slots [batch, columns] of the first `columns` positions; beyond a request's own length: to be masked."""
        return self._table.index_select(0, rows)[:, :columns]

    def at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots at positions [batch, n] of rows [batch], or elementwise where both are [n]."""
        return self._table[rows.unsqueeze(1) if positions.dim() == 2 else rows, positions]
