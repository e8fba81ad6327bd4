"""Layers, rules and references resolved from real files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.model import (
    Exactness,
    SecretRef,
    find_workspace,
    init_workspace,
    load_workspace,
    profile_from_json,
    profile_to_json,
    resolve,
)

from .workspaces import HOST, deployment, make

SHAPES = {"b8k4": (8, 4), "b16k4": (16, 4), "b16k8": (16, 8), "b24k6": (24, 6), "b32k8": (32, 8), "b48k8": (48, 8)}


@pytest.fixture(autouse=True)
def _no_workspace_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDTREE_WORKSPACE", raising=False)


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    init_workspace(tmp_path / "w")
    return tmp_path / "w"


@pytest.mark.parametrize("host", ["ct200", "b300", "local"])
@pytest.mark.parametrize("profile", ["ar", "chain", *SHAPES])
def test_every_packaged_profile_fits_every_packaged_host(packaged: Path, host: str, profile: str) -> None:
    found = resolve(load_workspace(packaged), host, None, profile).profile
    assert (found.budget, found.topk) == SHAPES.get(profile, (None, None))
    assert found.algorithm == {"ar": "none", "chain": "dflash"}.get(profile, "ddtree")
    assert (found.drafter is None) == (found.min_accept_length is None) == (profile == "ar")
    assert found.name == profile


def test_the_packaged_hosts_are_the_machines_of_the_issue(packaged: Path) -> None:
    workspace = load_workspace(packaged)
    assert workspace.default_host == "local"
    ct200, b300, local = (resolve(workspace, name) for name in ("ct200", "b300", "local"))
    assert (ct200.host.gpus.arch, ct200.host.gpus.count, ct200.host.gpus.interconnect) == ("sm_120", 8, "pcie")
    assert (b300.host.gpus.arch, b300.host.gpus.count, b300.host.gpus.interconnect) == ("sm_103", 8, "nvlink")
    assert (ct200.service_name, ct200.service.port, ct200.profile.name) == ("sglang-k26-ddtree", 30000, "b8k4")
    assert (ct200.profile.tp, ct200.profile.exactness.policy) == (8, "near-tie")
    assert (local.host.transport, local.host.supervisor, local.profile.engine) == ("local", "process", "reference")
    assert (local.profile.exactness.policy, local.profile.dtype) == ("exact", "float32")
    for placeholder in (ct200, b300):
        assert placeholder.host.host_key is placeholder.host.known_hosts is None


def test_the_rule_of_b300_turns_graphs_off_from_budget_16_and_says_so(packaged: Path) -> None:
    workspace = load_workspace(packaged)
    for profile, (budget, _) in SHAPES.items():
        found = resolve(workspace, "b300", None, profile).profile
        assert found.cuda_graph == (budget < 16)
        assert [rule.changes for rule in found.applied_rules] == [["cuda_graph true -> false"]] * (budget >= 16)
        assert all("sm_103" in str(rule) for rule in found.applied_rules)
        applied = resolve(workspace, "ct200", None, profile).profile.applied_rules
        assert [rule.changes for rule in applied] == [["extra_args + --disable-custom-all-reduce"]]


def test_a_host_that_changes_base_and_address_keeps_shape_and_profiles(tmp_path: Path) -> None:
    """The test workspaces of ct200 and b300: engine base, address and port differ, ``--profile`` swaps the shape."""
    workspace = load_workspace(make(tmp_path))
    for name, (budget, topk) in SHAPES.items():
        found = resolve(workspace, "h", "one", name)
        assert (found.profile.engine, found.profile.budget, found.profile.topk) == ("reference", budget, topk)
        assert found.service.profile == "b8k4"


def test_stronger_layers_win_and_dictionaries_merge(tmp_path: Path) -> None:
    files = {
        "profiles/low.yaml": "extends: tiny\nenv: {A: '1', B: '2'}\nextra_args: [--num-threads, 1]\n"
        "load_timeout_s: 5\n",
        "profiles/high.yaml": "extends: b16k8\nenv: {B: 3, A: null}\nextra_args: [--log-level=debug]\ntopk: 3\n"
        "exactness: {max_new_tokens: 7}\n",
    }
    workspace = load_workspace(make(tmp_path, files, host=HOST.replace("base: tiny", "base: low")))
    found = resolve(workspace, "h", None, "high").profile
    assert found.env == {"B": "3"}
    assert found.extra_args == ["--num-threads", "1", "--log-level=debug"]
    assert (found.budget, found.topk, found.load_timeout_s, found.base) == (16, 3, 5, "low")
    assert found.exactness == Exactness(
        policy="exact", epsilon_roundings=0, concurrency=[1, 8], max_new_tokens=7, prompts=None, time_limit_s=300
    )


def test_null_takes_away_the_arguments_of_a_base(tmp_path: Path) -> None:
    files = {
        "profiles/low.yaml": "extends: tiny\nextra_args: [--x]\n",
        "profiles/high.yaml": "extends: ar\nextra_args:\n",
    }
    workspace = load_workspace(make(tmp_path, files, host=HOST.replace("base: tiny", "base: low")))
    assert resolve(workspace, "h", None, "high").profile.extra_args == []
    assert resolve(workspace, "h", None, "ar").profile.extra_args == ["--x"]


def test_a_budget_narrower_than_the_block_is_the_engines_to_decide(tmp_path: Path) -> None:
    assert deployment(tmp_path, "budget: 1\ntopk: 1\n").profile.budget == 1


def test_free_arguments_are_kept_byte_for_byte(tmp_path: Path) -> None:
    found = deployment(tmp_path, 'extra_args: [--num-threads, 2, --log-level=info, "", 0.50, "a\\tb"]\n')
    assert found.profile.extra_args == ["--num-threads", "2", "--log-level=info", "", "0.50", "a\tb"]


@pytest.mark.parametrize(
    "argument", ["--tokenizer-path", "--speculative-draft-model-quantization", "--fault", "--tool-call-parser", "-v"]
)
def test_flags_beside_the_profiles_are_free(tmp_path: Path, argument: str) -> None:
    assert deployment(tmp_path, f"extra_args: ['{argument}', x]\n").profile.extra_args == [argument, "x"]


@pytest.mark.parametrize(
    "variable", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "NCCL_P2P_LEVEL", "SGLANG_KEYS", "MONKEY"]
)
def test_variables_that_only_sound_secret_are_free(tmp_path: Path, variable: str) -> None:
    assert deployment(tmp_path, f"env: {{{variable}: x}}\n").profile.env == {variable: "x"}


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.2", "'::1'", "localhost"])
def test_loopback_needs_no_key(tmp_path: Path, bind: str) -> None:
    assert deployment(tmp_path, f"bind: {bind}\n").profile.bind == bind.strip("'")


def test_beyond_loopback_with_a_key_or_a_reason(tmp_path: Path) -> None:
    assert deployment(tmp_path / "a", "bind: 0.0.0.0\nopen: behind a firewall\n").profile.open == "behind a firewall"
    keyed = deployment(tmp_path / "b", "bind: 0.0.0.0\napi_key: {file: /etc/key}\n").profile
    assert keyed.api_key == SecretRef(file="/etc/key")


def test_a_profile_names_the_hosts_secret(tmp_path: Path) -> None:
    files = {"profiles/keyed.yaml": "extends: b8k4\napi_key: {secret: api}\n"}
    host = HOST + "secrets:\n  api: {file: /etc/ddtree/key}\n"
    found = resolve(load_workspace(make(tmp_path, files, host=host)), "h", None, "keyed")
    assert found.profile.api_key == SecretRef(file="/etc/ddtree/key")


def test_rules_add_arguments_and_variables(tmp_path: Path) -> None:
    rules = (
        "rules:\n- when: {arch: sm_120, algorithm: ddtree, max_budget: 8}\n"
        "  set: {extra_args: [--num-threads, 4, ''], env: {A: x}}\n  reason: few cores\n"
        "- when: {engine: sglang}\n  set: {cuda_graph: false}\n  reason: never here\n"
    )
    workspace = load_workspace(make(tmp_path, host=HOST + rules))
    found = resolve(workspace, "h").profile
    assert (found.extra_args, found.env) == (["--num-threads", "4", ""], {"A": "x"})
    assert [rule.changes for rule in found.applied_rules] == [["extra_args + --num-threads 4 ''", "env.A unset -> x"]]
    assert resolve(workspace, "h", None, "b16k4").profile.applied_rules == []


def test_a_profile_survives_its_json(tmp_path: Path) -> None:
    profile = deployment(tmp_path, "api_key: {file: /k}\nenv: {A: 'é\"'}\nmin_accept_length: 2\n").profile
    assert profile_from_json(profile_to_json(profile)) == profile
    with pytest.raises(Failed, match=r"profile\.json of the generation"):
        profile_from_json('{"name": "x"}')


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    workspace = load_workspace(make(tmp_path, {"hh.yaml": HOST + "  two: {base: tiny, profile: ar, port: 30001}\n"}))
    for arguments, wants in (
        (("hhh",), "no host 'hhh'"),
        (("h", "ones"), "no service 'ones'; did you mean 'one'?"),
        (("h", None, "b8k44"), "no profile 'b8k44'"),
        (("hh",), "hh has 2 services: which one?"),
    ):
        with pytest.raises(UsageError) as caught:
            resolve(workspace, *arguments)
        assert wants in caught.value.message
        assert caught.value.hint


def test_where_the_workspace_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = make(tmp_path / "here"), make(tmp_path / "other")
    deep = here / "a" / "b"
    deep.mkdir(parents=True)
    assert find_workspace(start=deep) == here
    monkeypatch.chdir(deep)
    assert find_workspace() == here
    monkeypatch.setenv("DDTREE_WORKSPACE", str(other))
    assert find_workspace() == other
    assert find_workspace(here) == here
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="has no inventories/"):
            find_workspace(wrong)
    monkeypatch.setenv("DDTREE_WORKSPACE", str(tmp_path))
    with pytest.raises(UsageError, match="DDTREE_WORKSPACE"):
        find_workspace()
    monkeypatch.delenv("DDTREE_WORKSPACE")
    with pytest.raises(UsageError, match="no workspace"):
        find_workspace(start=tmp_path)


def test_the_local_root_is_the_users_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HOST.replace("root: /opt/ddtree\n", "transport: local\nsupervisor: process\n")
    workspace = make(tmp_path, host=host)
    monkeypatch.setenv("XDG_DATA_HOME", "/data here")
    assert load_workspace(workspace).hosts["h"].root == "/data here/ddtree"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/u")
    assert load_workspace(workspace).hosts["h"].root == "/home/u/.local/share/ddtree"


def test_key_files_are_relative_to_the_workspace(tmp_path: Path) -> None:
    host = load_workspace(make(tmp_path, host="known_hosts: keys/known\nidentity_file: ~/.ssh/x\n" + HOST)).hosts["h"]
    assert (host.known_hosts, host.identity_file) == (str(tmp_path / "keys/known"), "~/.ssh/x")


def test_init_writes_a_workspace_that_loads_and_overwrites_nothing(tmp_path: Path) -> None:
    made = init_workspace(tmp_path / "new")
    assert Path("inventories/profiles/b8k4.yaml") in made
    assert Path(".gitignore") in made
    assert sorted(load_workspace(tmp_path / "new").hosts) == ["b300", "ct200", "local"]
    before = {path: path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file()}
    (tmp_path / "new/inventories/ct200.yaml").unlink()
    with pytest.raises(UsageError, match="exists already"):
        init_workspace(tmp_path / "new")
    after = {path: path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert after == {path: text for path, text in before.items() if path.name != "ct200.yaml"}


def test_init_leaves_a_gitignore_as_it_is(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("mine\n")
    assert Path(".gitignore") not in init_workspace(tmp_path)
    assert (tmp_path / ".gitignore").read_text() == "mine\n"


def test_init_says_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make a workspace"):
        init_workspace(tmp_path / "file" / "below")


def test_the_model_imports_nothing_heavy() -> None:
    code = (
        "import sys, ddtree_ops.model; print([m for m in ('jinja2', 'fabric', 'torch', 'httpx') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
