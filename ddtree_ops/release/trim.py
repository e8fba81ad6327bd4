"""What wheels carry and the engine never loads: always left out by engine, and by GPU arch where ``--slim`` asks.

The release's smoke imports prove on the host that nothing of it is needed to start. Libraries are not stripped: what
``strip`` writes depends on its version, and a release is the same bytes wherever it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import UsageError


@dataclass(frozen=True)
class Rule:
    """``what``: a pattern on paths below site-packages, where ``*`` crosses directories; or a distribution's name.

    ``proven``: an engine without it served on that arch. Else it follows from what the code there can load.
    """

    what: str
    why: str
    proven: bool = True


_NO_ENGINE_READS = (
    Rule("*.dist-info/sboms/*", "bill of materials of the build"),
    Rule("torch/test/*", "C++ test programs (86 MB)"),
)
#: By engine. SGLang compiles kernels while it runs: headers, libraries to link against and sources stay.
TRIM: dict[str, tuple[Rule, ...]] = {
    "sglang": _NO_ENGINE_READS,
    "router": _NO_ENGINE_READS,
    "reference": (
        *_NO_ENGINE_READS,
        Rule("*.a", "static libraries, to link against"),
        Rule("*.pyi", "types for checkers"),
        Rule("*.h", "headers, to compile against"),
        Rule("*.pxd", "Cython declarations"),
        Rule("torch/include/*", "headers (39 MB)"),
        Rule("torch/share/*", "CMake files"),
        Rule("torch/bin/*", "C++ test programs and protoc (52 MB)"),
        Rule("torch/lib/libtorchbind_test.so", "test library"),
        Rule("torch/lib/libjitbackend_test.so", "test library"),
        Rule("torch/lib/libbackend_with_compiler.so", "test library"),
        Rule("torch/lib/libaoti_custom_ops.so", "test library"),
        Rule("numpy/*/tests/*", "numpy's own tests"),
        Rule("numpy/tests/*", "numpy's own tests"),
        Rule("numpy/f2py/*", "Fortran compiler front end"),
    ),
}
#: Exceptions from the above.
KEEP = (Rule("torch/bin/torch_shm_manager", "import torch fails without it"),)

_DEVELOPERS = (
    Rule("*.pyi", "types for checkers", proven=False),
    Rule("*.pxd", "Cython declarations", proven=False),
    Rule("jedi/third_party/*", "type stubs for completion in IPython"),
)
_FA3 = "FlashAttention 3: its Python refuses all but sm_8x and sm_90 (sgl_kernel.flash_attn.is_fa3_supported)"
_SM90 = "kernels of sm_90: on others sgl_kernel.load_utils loads sm100"
_BLACKWELL = tuple(
    Rule(rule.what, rule.why, proven=False)
    for rule in (*_DEVELOPERS, Rule("sgl_kernel/flash_ops*", _FA3), Rule("sgl_kernel/sm90/*", _SM90))
)
_SERVED_WITHOUT = "served without it: text, --attention-backend triton, --sampling-backend pytorch"
#: Of --slim, by arch: paths. SGLang only, with the Triton attention backend, the one that verifies trees.
SLIM_FILES: dict[str, tuple[Rule, ...]] = {
    "sm_90": (
        *_DEVELOPERS,
        Rule("sgl_kernel/flash_ops*", "FlashAttention 3 (1.1 GB), another attention backend"),
        Rule("sgl_kernel/flashmla_ops*", "FlashMLA, another attention backend"),
        Rule("sgl_kernel/infllm_ops*", "InfLLM-V2, another attention backend"),
        Rule("sgl_kernel/sm100/*", "kernels of other archs: sgl_kernel.load_utils loads sm90 here"),
        Rule("flashinfer/data/cutlass/*", "sources that FlashInfer compiles; none of its kernels runs"),
        Rule("flashinfer/data/cccl/*", "sources that FlashInfer compiles; none of its kernels runs"),
        Rule("xgrammar/lib/*", "C++ libraries to link against; its Python binding lies elsewhere"),
        Rule("*.a", "static libraries, to link against"),
    ),
    "sm_100": _BLACKWELL,
    "sm_103": _BLACKWELL,
    "sm_120": _BLACKWELL,
}
#: Of --slim, by arch: whole distributions, which are then not even fetched. Others may need one by their metadata;
#: none imports it to serve.
SLIM_DISTRIBUTIONS: dict[str, tuple[Rule, ...]] = {
    "sm_90": tuple(
        Rule(name, f"{why}; {_SERVED_WITHOUT}")
        for why, names in (
            ("kernels for other archs, models or backends", "flash-attn-4 humming-kernels quack-kernels"),
            ("kernels for other archs, models or backends", "sgl-deep-gemm tokenspeed-mla tokenspeed-triton kernels"),
            ("kernels for other archs, models or backends", "kernels-data torch-c-dlpack-ext nvidia-cudnn-frontend"),
            ("a compiler of kernels", "helion tilelang z3-solver cuda-tile cuda-python nvidia-mathdx filecheck"),
            ("a compiler of kernels", "nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core"),
            ("a compiler of kernels", "nvidia-cutlass-dsl-libs-cu12 nvidia-cutlass-dsl-libs-cu13 nvidia-nvvm"),
            ("a compiler of kernels", "nvidia-cuda-cccl nvidia-cuda-crt nvidia-cuda-nvcc nvidia-cuda-nvdisasm"),
            ("another grammar backend", "outlines outlines-core airportsdata diskcache lark nest-asyncio pycountry"),
            ("quantisation at load", "torchao"),
            ("video input", "torchcodec"),
            ("Mistral's tokenizer", "mistral-common pydantic-extra-types"),
            ("serving by gRPC", "smg-grpc-servicer smg-grpc-proto grpcio-health-checking grpcio-reflection nccl4py"),
            ("downloads of models and data", "datasets multiprocess modelscope modelscope-hub"),
            ("encryption of downloads", "cryptography pycryptodomex truststore"),
            ("a client of another service", "httpx2 httpcore2 docstring-parser"),
            ("a tool", "py-spy pyelftools tomlkit tzdata"),
        )
        for name in names.split()
    ),
    "sm_100": (),
    "sm_103": (),
    "sm_120": (),
}


def slim_rules(arch: str) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    """(paths, distributions) that --slim leaves out for an arch. Raises UsageError for an arch without a list."""
    key = arch.rstrip("af")
    if key not in SLIM_FILES:
        raise UsageError(f"nothing is known to be spare on {arch}: --slim is for {', '.join(SLIM_FILES)}")
    return SLIM_FILES[key], SLIM_DISTRIBUTIONS[key]


def left_out_by(path: str, rules: tuple[Rule, ...]) -> Rule | None:
    """The rule that leaves a file out; ``path`` is relative to site-packages."""
    if any(fnmatchcase(path, rule.what) for rule in KEEP):
        return None
    return next((rule for rule in rules if fnmatchcase(path, rule.what)), None)
