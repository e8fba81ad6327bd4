"""Which pins go into a release."""

from __future__ import annotations

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.release.choice import Target, choose
from ddtree_ops.release.lock import Lock, load_lock, locked_pythons, parse_lock
from ddtree_ops.release.trim import SLIM_DISTRIBUTIONS, SLIM_FILES, left_out_by, slim_rules

HASH = "a" * 64
SGLANG = "sglang-0.5.17"


def lock(*pins: str) -> Lock:
    """Of ``name`` and ``name<parent,parent``."""
    lines = ["# python: 3.12", "# machine: x86_64", "# glibc: 2.34", "# resolve: root==1"]
    for pin in pins:
        name, _, via = pin.partition("<")
        lines.append(f"{name}==1 --hash=sha256:{HASH}" + (f"  # via {via.replace(',', ', ')}" if via else ""))
    return parse_lock("\n".join(lines), "x")


def names(made: Lock, *provided: str, slim: bool = False) -> list[str]:
    target = Target("sglang-x", "3.12", "sm_90", slim=slim, provided=provided)
    return [pin.name for pin in choose(target, made).pins]


def test_what_only_the_provided_need_is_provided_with_them() -> None:
    made = lock(
        "root", "torch<root,vision", "vision<root", "cuda<torch", "cublas<cuda,cudnn", "cudnn<torch", "np<root,torch"
    )
    assert names(made) == ["root", "torch", "vision", "cuda", "cublas", "cudnn", "np"]
    assert names(made, "torch") == ["root", "vision", "np"]
    assert names(made, "torch", "vision") == ["root", "np"]


def test_pins_that_need_each_other_go_together() -> None:
    made = lock("root", "torch<root,b", "a<torch,b", "b<a")
    assert names(made, "torch") == ["root"]


def test_what_only_the_dropped_need_stays() -> None:
    made = lock("root", "outlines<root", "jinja<outlines", "torch<root", "sympy<torch,outlines")
    assert names(made, slim=True) == ["root", "jinja", "torch", "sympy"]
    assert names(made, "torch", slim=True) == ["root", "jinja"]


def test_versions_are_the_locks_or_what_is_said() -> None:
    made = lock("root", "torch<root", "numpy<root")
    chosen = choose(Target("sglang-x", "3.12", provided=("Torch", "numpy==2.5")), made)
    assert chosen.provided == {"numpy": "2.5", "torch": "1"}


@pytest.mark.parametrize(
    ("provided", "complaint"),
    [
        ("root", "'root' is no part"),
        ("torhc", r"did you mean torch\?"),
        ("torch>=1", "no part"),
        ("torch==1 --pre", "no part"),
        ("../torch", "no part"),
    ],
)
def test_what_a_host_cannot_provide_is_refused(provided: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        choose(Target("sglang-x", "3.12", provided=(provided,)), lock("root", "torch<root"))
    with pytest.raises(UsageError, match="there twice"):
        choose(Target("sglang-x", "3.12", provided=("torch", "torch==1")), lock("root", "torch<root"))


def test_slim_is_for_archs_that_are_known() -> None:
    with pytest.raises(UsageError, match="sm_80: --slim is for sm_90, sm_100, sm_103, sm_120"):
        choose(Target("sglang-x", "3.12", "sm_80", slim=True), lock("root"))
    assert slim_rules("sm_90a") == slim_rules("sm_90")


@pytest.mark.parametrize("arch", SLIM_FILES)
def test_each_rule_of_slim_has_a_reason_and_means_something(arch: str) -> None:
    files, distributions = slim_rules(arch)
    assert all(len(rule.why) > 10 for rule in (*files, *distributions))
    for python in locked_pythons(SGLANG):
        assert {rule.what for rule in distributions} <= {pin.name for pin in load_lock(SGLANG, python).pins}
    own, other = ("sm90", "sm100") if arch == "sm_90" else ("sm100", "sm90")
    assert left_out_by(f"sgl_kernel/{own}/common_ops.abi3.so", files) is None
    assert left_out_by(f"sgl_kernel/{other}/common_ops.abi3.so", files) is not None
    assert left_out_by("sgl_kernel/flash_ops.abi3.so", files) is not None
    assert left_out_by("triton/backends/nvidia/include/cuda.h", files) is None


def test_only_sm_90_is_proven_and_drops_distributions() -> None:
    assert [arch for arch, rules in SLIM_DISTRIBUTIONS.items() if rules] == ["sm_90"]
    for arch, rules in SLIM_FILES.items():
        kernels = [rule.proven for rule in rules if rule.what.startswith("sgl_kernel/")]
        assert kernels == [arch == "sm_90"] * len(kernels) != []


def test_torch_and_its_cuda_wheels_are_one_resolution() -> None:
    for python in locked_pythons(SGLANG):
        made = load_lock(SGLANG, python)
        assert made.resolve == "sglang==0.5.17"
        provided = ("torch", "torchvision", "torchaudio", "triton")
        kept = {pin.name: pin.version for pin in choose(Target(SGLANG, python, "sm_90", provided=provided), made).pins}
        assert kept["sglang-kernel"] == "0.4.5"
        assert not {"torch", "triton", "sympy", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} & kept.keys()
        assert {"numpy", "flashinfer-python", "nvidia-cutlass-dsl"} <= kept.keys()
