"""Which release a host gets, by what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddtree_ops.deploy.facts import System
from ddtree_ops.deploy.fitting import fitting, misfits, release_ids, target
from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.model import Deployment, init_workspace, load_workspace, resolve

UBUNTU = System(python="3.12.3", pythons=["3.12"], machine="x86_64", glibc="2.39", driver="580.159.04")


@pytest.fixture
def ct200(tmp_path: Path) -> Deployment:
    """SGLang on sm_120, with options of its host."""
    init_workspace(tmp_path)
    path = tmp_path / "inventories/ct200.yaml"
    options = 'release:\n  wheels: index\n  slim: true\n  provided: [torch, "numpy==2.5.2"]\n'
    path.write_text(path.read_text() + options)
    return resolve(load_workspace(tmp_path), "ct200")


def test_the_host_decides_the_python_and_the_inventory_the_rest(ct200: Deployment) -> None:
    made = fitting(ct200, UBUNTU)
    assert (made.base, made.python, made.arch) == ("sglang-0.5.17", "3.12", "sm_120")
    assert (made.wheels, made.slim, made.provided) == ("index", True, ("torch", "numpy==2.5.2"))
    assert made == target(ct200, "3.12")
    assert fitting(ct200, msgspec.structs.replace(UBUNTU, python="3.11.2", pythons=["3.11"])).python == "3.11"
    ids = release_ids(ct200)
    assert list(ids) == ["3.11", "3.12"]
    assert len(set(ids.values())) == 2


def test_the_reference_engine_runs_on_cpus_whatever_gpus_its_host_has(ct200: Deployment) -> None:
    profile = msgspec.structs.replace(ct200.profile, engine="reference", release_base="reference")
    found = target(msgspec.structs.replace(ct200, profile=profile), "3.11")
    assert (ct200.host.gpus.arch, found.arch) == ("sm_120", "none")


def test_a_host_without_gpus_is_asked_for_no_driver(tmp_path: Path) -> None:
    init_workspace(tmp_path)
    plain = resolve(load_workspace(tmp_path), "ct200")
    host = msgspec.structs.replace(plain.host, gpus=msgspec.structs.replace(plain.host.gpus, arch="none"))
    bare = msgspec.structs.replace(plain, host=host)
    assert fitting(bare, msgspec.structs.replace(UBUNTU, driver="")).arch == "none"


def test_another_python_of_the_host_will_do(ct200: Deployment) -> None:
    more = msgspec.structs.replace(UBUNTU, python="3.13.5", pythons=["3.11", "3.12", "3.13"])
    assert fitting(ct200, more).python == "3.12"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"python": "3.13.5", "pythons": ["3.9", "3.13"]}, r"ct200 has Python 3\.9, 3\.13; .* for 3\.11 and 3\.12"),
        ({"python": "", "pythons": []}, "ct200 has Python none"),
        ({"machine": "aarch64"}, "it is for x86_64, the host is aarch64"),
        ({"glibc": "2.31"}, r"it needs glibc 2\.34, the host has 2\.31"),
        ({"glibc": "2.4"}, r"it needs glibc 2\.34, the host has 2\.4"),
        ({"glibc": ""}, r"it needs glibc 2\.34, the host has another libc"),
        ({"driver": "575.57.08"}, r"it needs NVIDIA driver 580, the host has 575\.57\.08"),
        ({"driver": None}, "it needs NVIDIA driver 580, the host has none"),
    ],
)  # fmt: skip
def test_a_host_that_does_not_fit_is_refused_with_both_sides_named(
    ct200: Deployment, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(Failed, match=complaint):
        fitting(ct200, msgspec.structs.replace(UBUNTU, **change))


def test_the_reference_engine_needs_no_driver(tmp_path: Path) -> None:
    init_workspace(tmp_path)
    local = resolve(load_workspace(tmp_path), "local")
    plain = System(python="3.11.2", pythons=["3.11"], machine="x86_64", glibc="2.36")
    assert fitting(local, plain).base == "reference"
    assert misfits({"machine": "x86_64", "glibc": "2.28", "driver": None}, plain) == []


def test_a_base_of_another_engine_is_refused(ct200: Deployment) -> None:
    profile = msgspec.structs.replace(ct200.profile, release_base="reference")
    with pytest.raises(UsageError, match="release_base reference is not of the engine sglang"):
        release_ids(msgspec.structs.replace(ct200, profile=profile))


def test_what_an_arch_rule_refuses_has_no_release(ct200: Deployment) -> None:
    """Given a profile that is known to fail on the host's GPUs, refuse with the rule's name and its source."""
    profile = msgspec.structs.replace(ct200.profile, extra_args=["--moe-runner-backend", "deep_gemm"])
    with pytest.raises(UsageError, match=r"moe-deep-gemm; SGLang .*configurer\.py") as refused:
        fitting(msgspec.structs.replace(ct200, profile=profile), UBUNTU)
    assert "severity" in refused.value.hint
