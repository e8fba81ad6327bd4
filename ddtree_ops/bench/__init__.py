"""Measuring a running server. Tokens are the server's own counts, never chunks."""

from ddtree_ops.bench.load import Cell, load_held_out, measure

__all__ = ["Cell", "load_held_out", "measure"]
