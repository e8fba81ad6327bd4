"""Inside a tree's Python: SGLang's layers as they run on a GPU, over stand-ins for the compiled kernels.

A stand-in notes that it was called and computes nothing: whether a layer takes the compiled kernel or PyTorch is what
the patch decides, and the kernels themselves (half types only) are not on this machine.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .bases import here
from .configured import configured

HIDDEN, EPSILON = 64, 1e-6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Kernels:
    """Puts stand-ins into a module of SGLang under the names that it imports on a GPU."""

    def __init__(self, module: str, *names: str) -> None:
        self.called: list[str] = []
        self.module = importlib.import_module(module)
        for name in names:
            setattr(self.module, name, self._kernel(name))

    def _kernel(self, name: str) -> Callable[..., Any]:
        def kernel(first: Any = None, *rest: Any, **more: Any) -> Any:
            self.called.append(name)
            return first

        return kernel


def norm(name: str, dtype: str, residual: bool, shape: list[int]) -> dict[str, Any]:
    """{"called", "apart": the largest distance from the same in float64}. ``residual``: the fused add comes first."""
    names = ("rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm")
    kernels = _Kernels("sglang.srt.layers.layernorm", *names)
    torch.manual_seed(1)
    with configured(), torch.inference_mode():
        layer = getattr(kernels.module, name)(HIDDEN, eps=EPSILON)
        layer.weight.data.normal_(1.0, 0.3)
        layer.to(DTYPES[dtype])
        x = torch.randn(*shape, HIDDEN).to(DTYPES[dtype])
        other = torch.randn(*shape, HIDDEN).to(DTYPES[dtype]) if residual else None
        exact = x.double() if other is None else x.double() + other.double()
        weight = layer.weight.double() + (1.0 if name == "GemmaRMSNorm" else 0.0)
        wanted = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPSILON) * weight
        got = layer.forward_cuda(x, other)
    out, left = got if residual else (got, None)
    apart = [(out.double() - wanted).abs().max().item()]
    apart += [] if left is None else [(left.double() - exact).abs().max().item()]
    return {"called": kernels.called, "apart": max(apart), "shape": list(out.shape)}


def activation(name: str, dtype: str) -> dict[str, Any]:
    """The same for SiluAndMul and GeluAndMul."""
    kernels = _Kernels("sglang.srt.layers.activation", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    torch.manual_seed(2)
    with configured(), torch.inference_mode():
        layer = getattr(kernels.module, name)()
        x = 4 * torch.randn(5, 2 * HIDDEN).to(DTYPES[dtype])
        gate, up = x.double().chunk(2, dim=-1)
        functions = torch.nn.functional
        wanted = up * (functions.silu(gate) if name == "SiluAndMul" else functions.gelu(gate, approximate="tanh"))
        out = layer.forward_cuda(x)
    return {"called": kernels.called, "apart": (out.double() - wanted).abs().max().item()}


def rope(dtype: str) -> dict[str, Any]:
    """The same for the rotary embedding in neox style, as on CUDA with a head size that has a compiled kernel."""
    kernels = _Kernels("sglang.srt.layers.rotary_embedding.base", "apply_rope_with_cos_sin_cache_inplace")
    torch.manual_seed(3)
    with configured(), torch.inference_mode():
        layer = kernels.module.RotaryEmbedding(HIDDEN, HIDDEN, 128, 10000, True, torch.float32)
        layer.use_fallback_kernel = False
        positions = torch.tensor([0, 1, 7, 120])
        query, key = (torch.randn(4, heads * HIDDEN).to(DTYPES[dtype]) for heads in (4, 2))
        frequencies = 10000.0 ** -(torch.arange(0, HIDDEN, 2).double() / HIDDEN)
        angles = positions.double()[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        wanted = []
        for tensor in (query, key):
            one, two = tensor.double().view(4, -1, HIDDEN).chunk(2, dim=-1)
            wanted.append(torch.cat([one * cos - two * sin, two * cos + one * sin], -1).view(4, -1))
        got = layer.forward_cuda(positions, query, key)
    apart = max((a.double() - b).abs().max().item() for a, b in zip(got, wanted, strict=True))
    return {"called": kernels.called, "apart": apart}


def tries_fused_qk_norm(dtype: str) -> dict[str, Any]:
    """Whether the fused QK norm is compiled for a type, and taken."""
    kernels = _Kernels("sglang.kernels.ops.layernorm.norm", "_jit_qknorm_module")
    taken = bool(kernels.module.can_use_fused_inplace_qknorm(HIDDEN, DTYPES[dtype]))
    return {"called": kernels.called, "taken": taken}


class _StopError(Exception):
    pass


def triton_precision(dtype: str, tf32: bool, already: str | None) -> str | None:
    """TRITON_F32_DEFAULT once a model runner has got as far as its device, which comes before all kernels."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    class Runner(ModelRunner):  # type: ignore[misc, unused-ignore]
        def _not_here(self) -> None:
            pass

        init_remote_instance_weight_transporter = init_msprobe = init_spec_aux_hidden_state = _not_here

    def stop(_: object) -> Any:
        raise _StopError

    os.environ.pop("TRITON_F32_DEFAULT", None)
    if already is not None:
        os.environ["TRITON_F32_DEFAULT"] = already
    model = SimpleNamespace(
        dtype=DTYPES[dtype],
        is_generation=True,
        is_multimodal=False,
        is_multimodal_chunked_prefill_supported=False,
        is_hybrid_swa=False,
        is_hybrid_swa_compress=False,
        attention_arch=None,
        attention_chunk_size=None,
    )
    kept = torch.get_device_module
    vars(torch)["get_device_module"] = stop
    try:
        with configured(enable_tf32_matmul=tf32) as server_args:
            here().runner_of(Runner, model, server_args)
    except _StopError:
        return os.environ.get("TRITON_F32_DEFAULT")
    finally:
        vars(torch)["get_device_module"] = kept
        torch.set_float32_matmul_precision("highest")
    raise AssertionError("the runner went past its device")


def embeddings_type(dtype: str) -> str:
    """The type of the embeddings that a model without graphs is given, which is how DFLASH feeds its drafter."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner = object.__new__(ModelRunner)
    runner.dtype, runner.support_pp, runner.is_generation = DTYPES[dtype], False, True
    batch = SimpleNamespace(
        input_embeds=torch.zeros(3, HIDDEN, dtype=DTYPES[dtype]), replace_embeds=None, replace_positions=None
    )
    return str(runner._extend_forward_kwargs(batch, None)["input_embeds"].dtype)


def experts(routed: int, asked: int, scale: float) -> dict[str, Any]:
    """The same for routed experts of a float32 model, their kernels in Triton's interpreter, on the path of a GPU."""
    from sglang.kernels.ops.activation import activation

    names = ("moe_sum_reduce", "moe_sum_reduce_torch_compile", "use_symmetric_memory", "get_tp_group")
    kernels = _Kernels("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe", *names)
    kernels.module.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()
    compiled = _Kernels("sglang.kernels.ops.activation.activation", "_run_activation_inplace")
    kernels.module.silu_and_mul = activation.silu_and_mul
    kernels.module._is_cuda = True
    torch.manual_seed(4)
    rows, inner, block = 5, 32, 16
    x = torch.randn(rows, HIDDEN)
    up, down = torch.randn(routed, 2 * inner, HIDDEN) / 8, torch.randn(routed, HIDDEN, inner) / 5
    weights, chosen = torch.rand(rows, routed).topk(asked, dim=-1)
    wanted = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    for row, place in itertools.product(range(rows), range(asked)):
        expert = int(chosen[row, place])
        gate, other = (up[expert].double() @ x[row].double()).chunk(2)
        mixed = down[expert].double() @ (torch.nn.functional.silu(gate) * other)
        wanted[row] += scale * weights[row, place].double() * mixed
    of_expert = [(chosen.flatten() == expert).nonzero().flatten().tolist() for expert in range(routed)]
    blocks = [(expert, places) for expert, places in enumerate(of_expert) if places]
    ids = [place for _, places in blocks for place in places + [rows * asked] * (block - len(places))]
    config = {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 1}
    no = dict.fromkeys(("b1", "b2", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "block_shape"))
    off = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
    )
    with configured(), torch.inference_mode():
        got = kernels.module._fused_moe_kernel_sequence(
            *(x, up, down, weights, chosen.int(), torch.tensor(ids).int(), torch.tensor([e for e, _ in blocks]).int()),
            *(torch.tensor([len(ids)]).int(), config, None),
            **dict.fromkeys(here().TMA, False),
            **no,
            **off,
            **dict.fromkeys(("no_combine", "inplace", "apply_router_weight_on_input", "filter_expert"), False),
            **dict.fromkeys(("gemm1_alpha", "gemm1_limit")),
            activation="silu",
            is_gated=True,
            routed_scaling_factor=scale,
        )
    called = [name for name in (*kernels.called, *compiled.called) if name != "get_tp_group"]
    return {"called": called, "apart": (got.double() - wanted).abs().max().item()}
