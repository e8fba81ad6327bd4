"""Rules about GPU archs: what they change in a profile, what they refuse, and that both say by whose word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Deployment, load_workspace, resolve
from ddtree_ops.model.archs import arch_of, arch_refusals, arch_table, arguments_of, verify_rows
from ddtree_ops.units import launch

from .workspaces import HOST, make

ARCHS = {"sm_90": "nvlink", "sm_100": "nvlink", "sm_103": "nvlink", "sm_120": "pcie"}


def deployed(path: Path, arch: str, extra: str = "", *, profile: str = "b8k4", link: str | None = None) -> Deployment:
    """The Kimi base on 8 GPUs of an arch."""
    host = HOST.replace("sm_120", arch).replace("interconnect: pcie", f"interconnect: {link or ARCHS[arch]}")
    host = host.replace("base: tiny", "base: kimi-k26").replace("[0, 1]", "[0, 1, 2, 3, 4, 5, 6, 7]")
    workspace = make(path, {"profiles/over.yaml": f"extends: {profile}\n{extra}"}, host=host)
    return resolve(load_workspace(workspace), "h", None, "over")


def test_every_rule_has_a_source_and_does_one_thing() -> None:
    rules = arch_table().rules
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.source
        assert (rule.refuse is None) != (rule.reason is None)
        assert bool(rule.refuse) != bool(rule.set or rule.extra_args or rule.copy_env)
        assert set(rule.when.archs or ARCHS) <= set(arch_table().archs)


def test_the_table_knows_the_four_archs() -> None:
    assert set(arch_table().archs) == set(ARCHS)
    assert [arch_of(name).shared_memory_kib for name in ("sm_90a", "sm_120")] == [227, 99]  # type: ignore[union-attr]
    assert arch_of("sm_75") is None
    for name, arch in arch_table().archs.items():
        assert arch.gpu_name == f"{name}a"
        assert arch.compute_capability == f"{name[3:-1]}.{name[-1]}"


# arch, profile keys, the rule that refuses
REFUSED = [
    ("sm_120", "attention_backend: fa3", "attention-fa3"),
    ("sm_103", "attention_backend: fa3", "attention-fa3"),
    ("sm_120", "attention_backend: trtllm_mha", "attention-trtllm-mha"),
    ("sm_90", "attention_backend: trtllm_mla", "attention-trtllm-mla"),
    ("sm_100", "attention_backend: hpc_ops", "attention-hpc-ops"),
    ("sm_120", 'extra_args: ["--moe-runner-backend", deep_gemm]', "moe-deep-gemm"),
    ("sm_120", 'extra_args: ["--moe-runner-b", deep_gemm]', "moe-deep-gemm"),
    ("sm_120", 'extra_args: ["--moe_runner=deep_gemm"]', "moe-deep-gemm"),
    ("sm_120", 'extra_args: ["--moe_runner_backend=flashinfer_trtllm"]', "moe-flashinfer-trtllm"),
    ("sm_100", 'extra_args: ["--moe-runner-backend=hpc_ops"]', "moe-hpc-ops"),
    ("sm_90", 'extra_args: ["--kv-cache-dtype", nvfp4]', "kv-nvfp4"),
    ("sm_120", 'extra_args: ["--quantization", nvfp4_online]', "nvfp4-online"),
]


@pytest.mark.parametrize(("arch", "keys", "rule"), REFUSED)
def test_what_cannot_work_is_refused_by_name_and_source(tmp_path: Path, arch: str, keys: str, rule: str) -> None:
    found = arch_refusals(deployed(tmp_path, arch, f"{keys}\n", profile="chain"))
    assert [each.rule for each in found] == [rule]
    assert rule in str(found[0]) and arch in str(found[0])
    assert re.search(r"SGLang|sgl_kernel", str(found[0]))


def test_each_refusal_is_tried() -> None:
    assert {rule for _, _, rule in REFUSED} == {rule.id for rule in arch_table().rules if rule.refuse}


@pytest.mark.parametrize(("arch", "keys", "rule"), REFUSED)
def test_a_silenced_refusal_is_none(tmp_path: Path, arch: str, keys: str, rule: str) -> None:
    silence = f"checks: {{{rule}: {{severity: 'off', reason: tried here}}}}\n"
    assert arch_refusals(deployed(tmp_path, arch, f"{keys}\n{silence}", profile="chain")) == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("profile", ["ar", "chain", "b8k4", "b48k8"])
def test_the_packaged_profiles_are_refused_nowhere(tmp_path: Path, arch: str, profile: str) -> None:
    assert arch_refusals(deployed(tmp_path, arch, profile=profile)) == []


@pytest.mark.parametrize(
    ("arch", "budget", "requests", "graphs"),
    [("sm_103", 8, 128, True), ("sm_103", 9, 128, False), ("sm_103", 48, 8, True), ("sm_103", 16, 128, False),
     ("sm_100", 48, 128, True), ("sm_120", 48, 128, True)],
)  # fmt: skip
def test_large_verify_batches_run_eagerly_on_sm_103(
    tmp_path: Path, arch: str, budget: int, requests: int, graphs: bool
) -> None:
    found = deployed(tmp_path, arch, f"budget: {budget}\nmax_running_requests: {requests}\n")
    assert found.profile.cuda_graph is graphs
    assert ("--disable-cuda-graph" not in launch(found, "0123456789abcdef").argv) is graphs
    said = [rule for rule in found.profile.applied_rules if "graph-rows-sm103" in rule.name]
    assert [rule.changes for rule in said] == [["cuda_graph true -> false"]] * (not graphs)


def test_a_silenced_rule_changes_nothing_and_checks_do_not_enter_a_generation(tmp_path: Path) -> None:
    silence = "checks: {graph-rows-sm103: {severity: 'off', reason: fixed in our build}}\n"
    found = deployed(tmp_path, "sm_103", f"budget: 48\n{silence}")
    assert found.profile.cuda_graph
    from ddtree_ops.model import profile_to_json

    assert "fixed in our build" not in profile_to_json(found.profile)


@pytest.mark.parametrize(("link", "tp", "there"), [("pcie", 8, True), ("pcie", 2, False), ("nvlink", 8, False)])
def test_all_reduce_without_nvlink(tmp_path: Path, link: str, tp: int, there: bool) -> None:
    argv = launch(deployed(tmp_path, "sm_120", f"tp: {tp}\n", link=link), "0123456789abcdef").argv
    assert ("--disable-custom-all-reduce" in argv) is there


def test_the_argument_is_not_said_twice(tmp_path: Path) -> None:
    found = deployed(tmp_path, "sm_120", 'extra_args: ["--disable-custom-all-reduce"]\n')
    assert found.profile.extra_args.count("--disable-custom-all-reduce") == 1
    assert found.profile.applied_rules == []


@pytest.mark.parametrize(("arch", "copied"), [("sm_90", False), ("sm_103", True), ("sm_120", True)])
def test_a_chosen_ptxas_reaches_triton(tmp_path: Path, arch: str, copied: bool) -> None:
    found = deployed(tmp_path, arch, "env: {TRITON_PTXAS_PATH: /usr/local/cuda/bin/ptxas}\n")
    env = launch(found, "0123456789abcdef").env
    assert env["TRITON_PTXAS_PATH"] == "/usr/local/cuda/bin/ptxas"
    assert env.get("TRITON_PTXAS_BLACKWELL_PATH") == ("/usr/local/cuda/bin/ptxas" if copied else None)


def test_rows_of_a_verify_batch() -> None:
    base: dict[str, Any] = {"block_size": 8, "budget": 16, "max_running_requests": None, "algorithm": "ddtree"}
    assert verify_rows(base) == 17 * 48
    assert verify_rows({**base, "algorithm": "dflash", "max_running_requests": 10}) == 80
    assert verify_rows({**base, "algorithm": "none"}) == 1


def test_arguments_however_they_are_written() -> None:
    assert arguments_of(["--a_b=c_d", "x", "--flag", "--k", "v"]) == {
        "--a-b",
        "--a-b=c_d",
        "--flag",
        "--flag=",
        "--k",
        "--k=v",
    }


def test_the_reference_engine_has_no_rules(tmp_path: Path) -> None:
    workspace = make(tmp_path, host=HOST)
    assert resolve(load_workspace(workspace), "h").profile.applied_rules == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("checks: {x1: {severity: loud, reason: r}}", "severity"), ("checks: {x1: {severity: info}}", "reason is missing"),
     ('checks: {"X Y": {severity: info, reason: r}}', "not a check"),
     ("checks: {x1: info}", "expected a mapping")],
)  # fmt: skip
def test_a_check_is_changed_with_a_reason_or_not_at_all(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        deployed(tmp_path, "sm_120", f"{text}\n")
