"""Active checks in an installed release, over the local transport: real Triton under its interpreter, real ptxas, gloo.

What runs here is what runs on a host, with cpu in place of cuda and gloo in place of nccl. No GPU is faked.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree_ops.doctor.active import ACTIVE, busy, p2p_copy, parse, release_of, run_one, source, tree_verify, try_out
from ddtree_ops.doctor.check import Case, Finding
from ddtree_ops.doctor.facts import host_facts
from ddtree_ops.engine.mask import ancestors
from ddtree_ops.model import load_workspace, resolve
from ddtree_ops.remote.local import LocalTransport

from . import releases
from .recorded import PAIR, change, healthy_case, load

RELEASE = "0123456789abcdef"
TREE = {"devices": ["cpu"], "dtypes": ["float32"], "shapes": [[4, 2, 64, 64]]}
Run = Callable[..., list[Finding]]

LOCAL = """\
address: 127.0.0.1
transport: local
supervisor: process
root: ROOT
gpus: {count: 2, name: none, arch: ARCH, memory_gib: 96, interconnect: pcie}
services:
  pair: {base: pair, profile: over, port: 30000, gpus: [0, 1]}
"""
ENV = 'env: {TRITON_INTERPRET: "1", OMP_NUM_THREADS: "1"}\n'


def case_at(directory: Path, root: Path, arch: str = "sm_120", facts: dict[str, Any] | None = None) -> Case:
    """A service of this machine whose releases are below ``root``."""
    inventories = directory / "inventories"
    (inventories / "profiles").mkdir(parents=True)
    (inventories / "here.yaml").write_text(LOCAL.replace("ROOT", str(root)).replace("ARCH", arch))
    (inventories / "profiles/pair.yaml").write_text(f"{PAIR}tp: 2\n")
    (inventories / "profiles/over.yaml").write_text(f"algorithm: ddtree\nbudget: 8\ntopk: 4\n{ENV}")
    return Case(resolve(load_workspace(directory), "here"), host_facts(facts or {"format": 1}))


@pytest.fixture(scope="module")
def triton_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return releases.triton_site(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def kernel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return releases.kernel_site(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def run(tmp_path: Path, triton_site: Path) -> Iterator[Run]:
    """Run one active check in a release with Triton and the given sites; nothing of it may stay in /tmp."""
    before = set(Path("/tmp").glob("ddtree-active-*"))

    def one(id_: str, asked: dict[str, Any], sites: list[Path] | None = None, startup: str = "", limit: float = 120):  # type: ignore[no-untyped-def]
        root = tmp_path / "root"
        releases.install(root, RELEASE, [*(sites or []), triton_site], startup)
        case = case_at(tmp_path / "workspace", root)
        with LocalTransport(case.deployment.host) as transport:
            active = dataclasses.replace(ACTIVE[id_], limit_s=limit)
            return run_one(active, case, transport, RELEASE, asked)

    yield one
    assert set(Path("/tmp").glob("ddtree-active-*")) == before


def test_a_triton_kernel_is_compiled_and_run(run: Run) -> None:
    assert run("triton-kernel", {"devices": ["cpu"]}) == []


def test_a_kernel_that_computes_wrongly_is_a_finding(run: Run, tmp_path: Path) -> None:
    startup = (
        "import triton.language as tl\nreal = tl.store\n"
        "tl.store = lambda at, value, mask=None: real(at, value + 1, mask=mask)\n"
    )
    (found,) = run("triton-kernel", {"devices": ["cpu"]}, startup=startup)
    assert "4097 of 4097 results are wrong" in found.seen or "error" in found.expected


def test_the_verify_kernel_of_the_release_agrees_with_the_oracle(run: Run, kernel_site: Path) -> None:
    assert run("tree-verify", {**TREE, "shapes": None}, [kernel_site], limit=280) == []


def faulty(directory: Path, kernel_site: Path, body: str) -> Path:
    """The kernels with one that wraps the real one: ``body`` changes its arguments (a list; 9 is the mask)."""
    shutil.copytree(kernel_site, directory)
    folder = directory / releases.KERNELS
    (folder / "extend_attention.py").rename(folder / "real_attention.py")
    (folder / "extend_attention.py").write_text(
        "import torch\n"
        "from sglang.kernels.ops.attention.real_attention import extend_attention_fwd as real\n\n\n"
        f"def extend_attention_fwd(*given, **more):\n    given = list(given)\n    {body}\n"
        "    return real(*given, **more)\n"
    )
    return directory


FAULTS = {
    "the mask is dropped": "given[9] = None",
    "the mask's rows are two too long": "m = given[9].clone(); m[9:] = given[9][7 : m.numel() - 2]; given[9] = m",
    "the second request reads the first one's mask": "given[11] = torch.zeros_like(given[11])",
    "a request is given the other's prefix": "given[8] = given[8].roll(3)",
    "the scale is lost": "more['sm_scale'] = 1.0",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_verify_that_reads_the_tree_wrongly_is_a_finding(
    run: Run, kernel_site: Path, tmp_path: Path, fault: str
) -> None:
    (found,) = run("tree-verify", TREE, [faulty(tmp_path / "faulty", kernel_site, FAULTS[fault])])
    assert "differs by" in found.seen and "node" in found.seen


def test_the_oracle_is_the_reference_engines_own() -> None:
    """The same tree through the engine's mask: a check that is wrong itself would be worse than none."""
    import numpy as np

    parents = np.array([[max(parent, 0) for parent in tree_verify.PARENTS]], dtype=np.int64)
    assert torch.equal(tree_verify.tree_cells(), torch.from_numpy(ancestors(parents, 2)[0]))
    case = tree_verify.Case((4, 2, 64, 64), torch.float32, 5)
    dense, start, width = case.dense(), 0, len(tree_verify.PARENTS)
    for request, prefix in enumerate(tree_verify.PREFIXES):
        own = slice(request * width, (request + 1) * width)
        slots = case.slots[start : start + prefix]
        start += prefix
        keys = torch.cat((case.pool_k[slots], case.k[own])).transpose(0, 1).unsqueeze(0)
        values = torch.cat((case.pool_v[slots], case.v[own])).transpose(0, 1).unsqueeze(0)
        allowed = torch.cat((torch.ones(width, prefix, dtype=torch.bool), tree_verify.tree_cells()), 1)
        query = case.q[own].transpose(0, 1).unsqueeze(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=allowed, enable_gqa=True
        )
        assert (mixed[0].transpose(0, 1).double() - dense[own]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("tool", "target", "knows"),
    [("ptxas", "sm_90a", True), ("ptxas", "sm_103a", False), ("ptxas-blackwell", "sm_103a", True),
     ("ptxas-blackwell", "sm_120a", True), ("ptxas-blackwell", "sm_100a", True)],
)  # fmt: skip
def test_the_ptxas_of_the_pinned_triton(run: Run, tool: str, target: str, knows: bool) -> None:
    found = run("ptxas", {"tool": tool, "target": target})
    assert (found == []) is knows
    if not knows:
        assert target in found[0].seen and "12.8" in found[0].seen


@pytest.mark.parametrize(
    ("shell", "said"),
    [("exit 1", "--version"), ("echo 'release 11.0'", "CUDA 11.0"), ("head -c 100000 /dev/urandom", "--version")],
)
def test_a_ptxas_that_is_none(run: Run, tmp_path: Path, shell: str, said: str) -> None:
    fake = tmp_path / "ptxas"
    fake.write_text(f"#!/bin/sh\n{shell}\n")
    fake.chmod(0o755)
    (found,) = run(
        "ptxas",
        {"tool": "ptxas", "target": "sm_90a"},
        startup=f"import os; os.environ['TRITON_PTXAS_PATH'] = {str(fake)!r}",
    )
    assert said in found.seen or "UnicodeDecodeError" in found.seen


def test_two_ranks_reduce(run: Run) -> None:
    asked = {"tp_sizes": [2], "sizes": [4096, 64 << 20], "backend": "gloo", "limit_s": 90.0}
    assert run("all-reduce", asked) == []


RANK = "import json, sys, time\nif '\"rank\": 1' in ' '.join(sys.orig_argv):\n    import torch.distributed as dist\n"


@pytest.mark.alone
def test_a_rank_that_hangs_is_named_with_its_size_and_ended(run: Run) -> None:
    began = time.monotonic()
    startup = f"{RANK}    dist.all_reduce = lambda data: time.sleep(600)\n"
    (found,) = run(
        "all-reduce", {"tp_sizes": [2], "sizes": [4096, 8192], "backend": "gloo", "limit_s": 20.0}, startup=startup
    )
    assert "TP 2" in found.seen and "hung in the all-reduce of 4096 bytes" in found.seen
    assert time.monotonic() - began < 80
    left = subprocess.run(["pgrep", "-f", "ddtree-active-.*active.py"], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_a_sum_that_is_wrong_is_a_finding(run: Run) -> None:
    startup = f"{RANK}    real = dist.all_reduce\n    dist.all_reduce = lambda data: (real(data), data.add_(1))\n"
    (found,) = run(
        "all-reduce", {"tp_sizes": [2], "sizes": [4096], "backend": "gloo", "limit_s": 60.0}, startup=startup
    )
    assert "rank 1" in found.seen and "wrong 4096" in found.seen


def test_copies_are_compared(run: Run) -> None:
    assert run("p2p-copy", {"devices": ["cpu"], "bytes": 1 << 20}) == []


@pytest.mark.parametrize("fault", ["one bit", "two words swapped", "zeros"])
def test_a_copy_that_is_corrupted_is_a_finding(fault: str) -> None:
    def move(data: torch.Tensor, device: str) -> torch.Tensor:
        came = data.clone()
        if fault == "one bit":
            came[777] ^= 1
        elif fault == "two words swapped":
            came[[5, 6]] = came[[6, 5]]
        else:
            came.zero_()
        return came

    answer = p2p_copy.main({"devices": ["cpu"], "bytes": 1 << 16}, move)
    assert not answer["ok"] and "words are wrong" in answer["seen"]
    data = torch.arange(100, dtype=torch.int32)
    assert p2p_copy.checksum(data) == p2p_copy.checksum(data.clone())
    assert p2p_copy.checksum(data) != p2p_copy.checksum(move(torch.arange(1000, dtype=torch.int32), "cpu"))


def test_the_reference_release_imports(run: Run) -> None:
    assert run("imports", {"modules": ["torch", "ddtree_ops.engine.server"]}) == []


def test_torch_without_code_for_the_arch_is_a_finding(run: Run) -> None:
    (found,) = run("imports", {"modules": ["torch"], "code": ["sm_120", "sm_120a"]})
    assert "has code for no GPU" in found.seen and "sm_120" in found.expected


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to make a library with an undefined symbol")
def test_an_undefined_symbol_is_a_finding(run: Run, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "a.c").write_text(
        "void absent_from_torch(void);\nvoid *PyInit_kernels(void) { absent_from_torch(); return 0; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", site / "kernels.so", tmp_path / "a.c"], check=True)
    (found,) = run("imports", {"modules": ["kernels"]}, [site])
    assert "undefined symbol: absent_from_torch" in found.seen


@pytest.mark.parametrize(
    ("startup", "said"),
    [("import os; os._exit(9)", "no answer (status 9)"), ("print('x' * 100_000)", ""),
     ("import os; os.write(1, b'DDTREE-ACTIVE {\\n' * 5)", "")],
)  # fmt: skip
def test_a_python_that_misbehaves(run: Run, startup: str, said: str) -> None:
    found = run("imports", {"modules": ["json"]}, startup=startup)
    assert [said in each.seen for each in found] == [True] * bool(said)


def test_a_script_that_hangs_is_ended_at_its_limit(run: Run, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "slow.py").write_text("import time\ntime.sleep(600)\n")
    began = time.monotonic()
    (found,) = run("imports", {"modules": ["slow"]}, [site], limit=3)
    assert "did not end within 3 s" in found.seen
    assert time.monotonic() - began < 20
    for folder in Path("/tmp").glob("ddtree-active-*"):
        shutil.rmtree(folder)  # SIGKILL leaves it; over ssh the host's own `timeout` ends it before


def test_answers_among_noise() -> None:
    assert parse(b'noise\nDDTREE-ACTIVE {"ok": true}\nmore\n') == {"ok": True}
    for output in (b"", b"DDTREE-ACTIVE {", b"DDTREE-ACTIVE []", b"DDTREE-ACTIVE " + b"[" * 100_000, b"\xff" * 100):
        assert parse(output) is None


def test_every_script_is_one_file_that_needs_nothing_of_ours() -> None:
    for active in ACTIVE.values():
        text = source(active.script)
        compile(text, active.script, "exec")
        assert "from ." not in text and "ddtree_ops" not in text


def gpu_case(tmp_path: Path, *changes: tuple[list[Any], Any]) -> Case:
    """ct200 with an installed release and nobody on its GPUs, and then changed."""
    reply = load("healthy", "ct200")
    for path, value in ((["cards", "processes"], []), (["cards", "gpus", "*", "memory_used_mib"], 4), *changes):
        change(reply, path, value)
    return Case(healthy_case(tmp_path, "ct200").deployment, host_facts(reply))


class Refused:
    """A transport that nobody may use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the host was contacted: {name}")


BUSY = {
    "a process": (
        [["cards", "processes"], [{"gpu": 3, "pid": 77, "name": "train", "memory_mib": 9}]],
        "train (pid 77)",
    ),
    "memory": ([["cards", "gpus", 2, "memory_used_mib"], 40_000], "GPU 2: 40000 MiB"),
    "load": ([["cards", "gpus", 1, "utilization"], 3], "GPU 1: 4 MiB, 3 %"),
    "unknown": ([["cards", "problem"], "did not end within 2.3 s"], "cannot be told"),
    "absent": ([["cards", "gpus"], []], "0 of the service's 8 GPUs"),
}


@pytest.mark.parametrize("kind", BUSY)
def test_gpus_that_somebody_uses_are_left_alone(tmp_path: Path, kind: str) -> None:
    (path, value), said = BUSY[kind]
    case = gpu_case(tmp_path, (path, value))
    found = try_out(case, Refused(), [name for name, each in ACTIVE.items() if each.gpus], lambda text: None)  # type: ignore[arg-type]
    assert set(found) == {name for name, each in ACTIVE.items() if each.gpus}
    for (finding,) in found.values():
        assert finding.severity == "error" and "not tried" in finding.seen and said in finding.seen


def test_free_gpus_are_free(tmp_path: Path) -> None:
    assert busy(gpu_case(tmp_path)) is None
    assert busy(healthy_case(tmp_path / "b", "b300")) is None


def test_without_a_release_nothing_is_tried(tmp_path: Path) -> None:
    case = gpu_case(tmp_path, (["releases", "installed"], []))
    found = try_out(case, Refused(), ACTIVE, lambda text: None)  # type: ignore[arg-type]
    assert all("no release is installed" in finding.seen for (finding,) in found.values())


def test_the_release_is_the_one_that_runs_else_the_newest(tmp_path: Path) -> None:
    assert release_of(gpu_case(tmp_path)) == "3f2a9c51d0e84b77"
    newer = gpu_case(tmp_path / "n", (["releases", "installed"], ["aa", "bb"]))
    assert release_of(newer) == "bb"


def test_what_is_asked_of_a_host(tmp_path: Path) -> None:
    case = gpu_case(tmp_path)
    asked = {name: active.request(case) for name, active in ACTIVE.items()}
    assert asked["all-reduce"] == {"tp_sizes": [8], "sizes": [4096, 64 << 20], "backend": "nccl", "limit_s": 90.0}
    assert asked["ptxas"] == {"tool": "ptxas-blackwell", "target": "sm_120a"}
    assert asked["imports"] is not None and asked["imports"]["shared_memory"] == 101_376
    assert asked["tree-verify"] is not None and asked["p2p-copy"] is not None
    single = healthy_case(tmp_path / "h", "h200")
    assert ACTIVE["all-reduce"].request(single) is None and ACTIVE["p2p-copy"].request(single) is None
