"""DDTREE: what SGLang's releases keep in different places, and nothing else."""

from __future__ import annotations

from typing import Any

from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func, verify_tree_greedy_triton
from sglang.srt.runtime_context import get_exec

__all__ = ["decode_graphs", "verify_tree_greedy_func", "verify_tree_greedy_triton"]


def decode_graphs(runner: Any) -> Any:
    """The configuration in which the capture of a runner's decode graphs finds its batch sizes, as ``bs``."""
    return get_exec().graph.cuda_graph_config.decode
