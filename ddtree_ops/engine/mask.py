"""The tree mask: who a node may attend to, and the flat buffer in which it travels.

As in SGLang's FULL mask the cells lie in one flat buffer, W x W of them a request (the prefix is always visible).
One function writes rows a stride apart, another reads them W apart: writing them block_size apart is the fault
that once made correct trees look bad.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.bool_]


def ancestors(parent: NDArray[np.int64], levels: int) -> Cells:
    """bool [batch, W, W]: row i sees itself and its ancestors only; parent [batch, W], the deepest node at `levels`."""
    batch, width = parent.shape
    seen = np.zeros((batch, width, width), dtype=np.bool_)
    request, node = np.arange(batch)[:, None], np.arange(width)[None, :]
    current = np.broadcast_to(node, (batch, width))
    for _ in range(levels + 1):
        seen[request, node, current] = True
        current = parent[request, current]
    return seen


def new_buffer(batch: int, width: int, stride: int) -> Cells:
    """A flat buffer of batch * W * W cells, all closed, with room behind it for rows written too far apart."""
    overrun = max(0, (width - 1) * stride + width - width * width)
    return np.zeros(batch * width * width + overrun, dtype=np.bool_)


def write_rows(buffer: Cells, cells: Cells, stride: int) -> None:
    """Write cells [batch, W, W] row by row, rows `stride` cells apart, requests W * W apart."""
    batch, width, _ = cells.shape
    for request in range(batch):
        for row in range(width):
            start = request * width * width + row * stride
            buffer[start : start + width] = cells[request, row]


def read_rows(buffer: Cells, batch: int, width: int) -> Cells:
    """Cells [batch, W, W] as attention reads them: rows W apart."""
    return buffer[: batch * width * width].reshape(batch, width, width)
