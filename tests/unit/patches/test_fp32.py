"""06-fp32-arithmetic: float32 tensors take PyTorch's arithmetic, others the compiled kernels as before."""

from __future__ import annotations

from typing import Any

import pytest

from . import inside_fp32
from .marks import every_base
from .trees import Tree

pytestmark = every_base

FP32 = 1e-5
"""A few roundings of values below 8; bf16's would be 1e-2."""

NORMS = [
    ("RMSNorm", False, [5], "rmsnorm"),
    ("RMSNorm", False, [3, 2], "rmsnorm"),
    ("RMSNorm", True, [5], "fused_add_rmsnorm"),
    ("GemmaRMSNorm", False, [5], "gemma_rmsnorm"),
    ("GemmaRMSNorm", False, [3, 2], "gemma_rmsnorm"),
    ("GemmaRMSNorm", True, [5], "gemma_fused_add_rmsnorm"),
]


def close(told: dict[str, Any]) -> bool:
    return bool(told["called"] == [] and told["apart"] < FP32)


@pytest.mark.parametrize(("name", "residual", "shape", "kernel"), NORMS)
def test_norms(name: str, residual: bool, shape: list[int], kernel: str, patched: Tree, stock: Tree) -> None:
    told = patched(inside_fp32.norm, name, "float32", residual, shape)
    assert close(told)
    assert told["shape"] == [*shape, inside_fp32.HIDDEN]
    assert stock(inside_fp32.norm, name, "float32", residual, shape)["called"] == [kernel]
    assert patched(inside_fp32.norm, name, "bfloat16", residual, shape)["called"] == [kernel]


@pytest.mark.parametrize(("name", "kernel"), [("SiluAndMul", "silu_and_mul"), ("GeluAndMul", "gelu_tanh_and_mul")])
def test_activations(name: str, kernel: str, patched: Tree, stock: Tree) -> None:
    assert close(patched(inside_fp32.activation, name, "float32"))
    assert stock(inside_fp32.activation, name, "float32")["called"] == [kernel]
    assert patched(inside_fp32.activation, name, "bfloat16")["called"] == [kernel]


@pytest.mark.parametrize(("asked", "scale"), [(1, 1.0), (2, 1.0), (3, 2.5)])
def test_experts(asked: int, scale: float, interpreted: Tree) -> None:
    """Stock rounds what each expert gives to float16."""
    assert close(interpreted(inside_fp32.experts, 4, asked, scale))


def test_rope(patched: Tree, stock: Tree) -> None:
    kernel = ["apply_rope_with_cos_sin_cache_inplace"]
    assert close(patched(inside_fp32.rope, "float32"))
    assert stock(inside_fp32.rope, "float32")["called"] == kernel
    assert patched(inside_fp32.rope, "bfloat16")["called"] == kernel


def test_the_fused_qk_norm_is_not_compiled_for_fp32(patched: Tree, stock: Tree) -> None:
    kernel = ["_jit_qknorm_module"]
    assert patched(inside_fp32.tries_fused_qk_norm, "float32") == {"called": [], "taken": False}
    assert stock(inside_fp32.tries_fused_qk_norm, "float32")["called"] == kernel
    assert patched(inside_fp32.tries_fused_qk_norm, "bfloat16") == {"called": kernel, "taken": True}


def test_a_float32_model_asks_triton_for_ieee(patched: Tree, stock: Tree) -> None:
    assert patched(inside_fp32.triton_precision, "float32", False, None) == "ieee"
    assert patched(inside_fp32.triton_precision, "float32", False, "tf32x3") == "tf32x3"
    assert patched(inside_fp32.triton_precision, "float32", True, None) is None
    assert patched(inside_fp32.triton_precision, "bfloat16", False, None) is None
    assert stock(inside_fp32.triton_precision, "float32", False, None) is None


def test_embeddings_have_the_model_s_type_where_no_graph_runs(patched: Tree, stock: Tree) -> None:
    assert patched(inside_fp32.embeddings_type, "float32") == "torch.float32"
    assert patched(inside_fp32.embeddings_type, "bfloat16") == "torch.bfloat16"
    # the drafter's float32 weights then refuse it
    assert stock(inside_fp32.embeddings_type, "float32") == "torch.bfloat16"
