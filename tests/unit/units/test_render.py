"""Rendered generations: one golden unit, the same process for both supervisors, nothing secret in any file.

The golden files are written anew by ``GOLDEN=1 python -m pytest tests/unit/units/test_render.py``; read the diff.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import msgspec
import pytest

from ddtree_ops.engine.arguments import parse_arguments
from ddtree_ops.errors import UsageError
from ddtree_ops.model import init_workspace, load_workspace, profile_from_json, resolve
from ddtree_ops.units import expectations, launch, render

from ..model.workspaces import deployment
from .systemd_words import command_line, environment_file

GOLDEN = Path(__file__).parent / "golden"
RELEASE = "0123456789abcdef"


def directive(unit: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{key}=")]


@pytest.mark.parametrize("name", ["unit", "env", "process.json", "profile.json"])
def test_the_packaged_ct200_renders_as_before(tmp_path: Path, name: str) -> None:
    init_workspace(tmp_path)
    text = render(resolve(load_workspace(tmp_path), "ct200"), RELEASE, 7).files[name]
    golden = GOLDEN / f"ct200-b8k4.{name}"
    if os.environ.get("GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


AWKWARD = 'env: {A: "q\\"%h $X ; \\\\ é"}\nextra_args: [--x, "q\\"%h $X ; \\\\ é", ";", ""]\n'


def test_both_supervisors_start_the_same_process(tmp_path: Path) -> None:
    found = deployment(tmp_path, AWKWARD)
    wanted = launch(found, RELEASE)
    files = render(found, RELEASE, 3).files
    (line,) = directive(files["unit"], "ExecStart")
    assert command_line(line) == [wanted.argv]
    assert environment_file(files["env"]) == wanted.env
    assert json.loads(files["process.json"]) == {"argv": wanted.argv, "env": wanted.env, "cwd": wanted.cwd}
    assert wanted.env["A"] == wanted.argv[-3] == 'q"%h $X ; \\ é'
    assert directive(files["unit"], "EnvironmentFile") == ["/opt/ddtree/services/one/generations/3/env"]
    assert profile_from_json(files["profile.json"]) == found.profile


@pytest.mark.parametrize("profile", ["ar", "chain", "b8k4", "b48k8"])
def test_the_reference_engine_takes_what_is_launched(tmp_path: Path, profile: str) -> None:
    found = deployment(tmp_path, "context_length: 512\nmax_running_requests: 4\n", profile=profile)
    argv = launch(found, RELEASE).argv
    assert argv[:3] == [f"/opt/ddtree/releases/{RELEASE}/venv/bin/python", "-m", "ddtree_ops.engine"]
    taken = parse_arguments(argv[3:])
    share = Path(f"/opt/ddtree/releases/{RELEASE}/share")
    assert (taken.model_path, taken.port, taken.host) == (share / "pair/target", 30000, "127.0.0.1")
    assert (taken.context_length, taken.max_running_requests, taken.dtype) == (512, 4, "float32")
    assert taken.speculative_algorithm == {"ar": None, "chain": "DFLASH"}.get(profile, "DDTREE")
    assert taken.speculative_ddtree_budget == found.profile.budget
    assert taken.speculative_ddtree_topk == found.profile.topk
    assert taken.speculative_draft_model_path == (None if profile == "ar" else share / "pair/draft")


def test_what_the_server_must_show(tmp_path: Path) -> None:
    tree = expectations(deployment(tmp_path / "a", profile="b16k4").profile)
    assert tree["speculative_algorithm"] == "DDTREE"
    assert tree["speculative_num_draft_tokens"] == 17
    assert (tree["speculative_ddtree_budget"], tree["speculative_ddtree_topk"]) == (16, 4)
    assert "speculative_ddtree_ladder" not in tree
    found = deployment(tmp_path / "l", "ladder: 8:4,32:0\n")
    assert expectations(found.profile)["speculative_ddtree_ladder"] == "8:4,32:0"
    argv = launch(found, RELEASE).argv
    assert argv[argv.index("--speculative-ddtree-ladder") + 1] == "8:4,32:0"
    chain = expectations(deployment(tmp_path / "b", "block_size: 6\n", profile="chain").profile)
    assert chain["speculative_num_draft_tokens"] == 6
    assert not any("ddtree" in key for key in chain)
    plain = expectations(deployment(tmp_path / "c", profile="ar").profile)
    assert plain["speculative_algorithm"] is None
    kimi = expectations(deployment(tmp_path / "d", "tp: 2\ncuda_graph: false\n", base="kimi-k26").profile)
    assert (kimi["tp_size"], kimi["disable_cuda_graph"], kimi["attention_backend"]) == (2, True, "triton")


def test_each_value_is_looked_for_under_the_name_that_a_server_has_for_it(tmp_path: Path) -> None:
    """A name that no server shows would compare nothing with nothing."""
    extra = 'tp: 2\nep: 2\ncontext_length: 4096\nmax_running_requests: 16\nladder: "8:4"\n'
    assert expectations(deployment(tmp_path, extra, base="kimi-k26").profile) == {
        "dtype": "bfloat16",
        "speculative_algorithm": "DDTREE",
        "speculative_num_draft_tokens": 9,
        "speculative_ddtree_budget": 8,
        "speculative_ddtree_topk": 4,
        "speculative_ddtree_ladder": "8:4",
        "context_length": 4096,
        "max_running_requests": 16,
        "tp_size": 2,
        "pp_size": 1,
        "ep_size": 2,
        "attention_backend": "triton",
        "disable_cuda_graph": False,
    }


def test_sglang_is_launched_with_what_the_profile_says(tmp_path: Path) -> None:
    extra = "tp: 2\nep: 2\nmemory_fraction: 0.7\ncontext_length: 4096\ncuda_graph: false\n"
    argv = launch(deployment(tmp_path, extra, base="kimi-k26"), RELEASE).argv
    pairs = dict(itertools.pairwise(argv))
    assert argv[1:3] == ["-m", "sglang.launch_server"]
    for flag, value in {
        "--model-path": "/models/Kimi-K2.6",
        "--speculative-algorithm": "DDTREE",
        "--speculative-draft-model-path": "/models/Kimi-K2.6-DFlash",
        "--speculative-ddtree-budget": "8",
        "--speculative-ddtree-topk": "4",
        "--tp-size": "2",
        "--ep-size": "2",
        "--mem-fraction-static": "0.7",
        "--context-length": "4096",
        "--attention-backend": "triton",
    }.items():
        assert pairs[flag] == value
    assert "--disable-cuda-graph" in argv
    assert argv[-1] == "--trust-remote-code"


def test_devices_are_open_for_gpus_only(tmp_path: Path) -> None:
    cpu = render(deployment(tmp_path / "a"), RELEASE, 1).files
    gpu = render(deployment(tmp_path / "b", "tp: 2\n", base="kimi-k26"), RELEASE, 1).files
    assert directive(cpu["unit"], "DeviceAllow") == []
    assert directive(cpu["unit"], "PrivateDevices") == ["yes"]
    assert environment_file(cpu["env"])["CUDA_VISIBLE_DEVICES"] == ""
    assert all("nvidia" in device for device in directive(gpu["unit"], "DeviceAllow"))
    assert directive(gpu["unit"], "PrivateDevices") == ["no"]
    assert environment_file(gpu["env"])["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("model", "home", "tmp"),
    [("/models/x", "yes", "yes"), ("/home/u/x", "read-only", "yes"), ("/var/tmp/x", "yes", "no")],
)
def test_hardening_does_not_hide_the_weights(tmp_path: Path, model: str, home: str, tmp: str) -> None:
    unit = render(deployment(tmp_path, f"model: {model}\n"), RELEASE, 1).files["unit"]
    assert directive(unit, "ProtectHome") == [home]
    assert directive(unit, "PrivateTmp") == [tmp]


def test_timeouts_follow_the_profile(tmp_path: Path) -> None:
    unit = render(deployment(tmp_path, "load_timeout_s: 1800\nstop_timeout_s: 90\n"), RELEASE, 1).files["unit"]
    assert directive(unit, "TimeoutStopSec") == ["90"]
    # Three failures, each at the very end of its load, must still count as three in one interval.
    assert int(directive(unit, "StartLimitIntervalSec")[0]) > 3 * (1800 + 90)


def test_a_key_is_a_credential_and_in_no_file(tmp_path: Path) -> None:
    found = deployment(tmp_path, 'bind: 0.0.0.0\napi_key: {file: "/etc/key%"}\n')
    files = render(found, RELEASE, 1).files
    assert directive(files["unit"], "LoadCredential") == ["api-key:/etc/key%%"]
    argv = launch(found, RELEASE).argv
    keyless = msgspec.structs.replace(found, profile=msgspec.structs.replace(found.profile, api_key=None))
    assert argv[:-2] == launch(keyless, RELEASE).argv
    assert argv[argv.index("--api-key-file") + 1] == "/run/credentials/one.service/api-key"
    assert json.loads(files["profile.json"])["api_key"] == {"file": "/etc/key%"}


@pytest.mark.parametrize("release", ["", "../x", "a/b", "A", "a b", "a\n"])
def test_a_release_id_that_is_none_is_refused(tmp_path: Path, release: str) -> None:
    with pytest.raises(UsageError, match="not a release id"):
        render(deployment(tmp_path), release, 1)


def test_a_code_point_that_systemd_drops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="U\\+FDD0"):
        render(deployment(tmp_path, 'extra_args: ["\\ufdd0"]\n'), RELEASE, 1)


def test_names_in_the_units_are_those_the_loader_allows(tmp_path: Path) -> None:
    """Given any text in a path, the unit keeps one directive a line: nothing that is written becomes a directive."""
    found = deployment(tmp_path, 'model: "/m/ %n;[Service] ExecStartPre=x"\n')
    unit = render(found, RELEASE, 1).files["unit"]
    assert len(directive(unit, "ExecStart")) == 1
    assert directive(unit, "ExecStartPre") == []
