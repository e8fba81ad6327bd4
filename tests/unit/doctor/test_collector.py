"""The collector as a host runs it: what it reads, that it ends, that it changes nothing, whatever the tools do."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.doctor.check import Case
from ddtree_ops.doctor.collector import parse, request, script
from ddtree_ops.doctor.examine import Report, examine
from ddtree_ops.doctor.facts import host_facts
from ddtree_ops.errors import Failed
from ddtree_ops.host.collector.links import acs_control, matrix

from .fakes import PROCESS, Host, smi_p2p, smi_topo, smi_xml
from .recorded import deployment

#: A whole run on a loaded machine of two cores; the collector's own limit is 2.7 s.
LONGEST_S = 6.0


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def python_part() -> str:
    """The Python inside the shell script."""
    return script().partition("-c '\n")[2].rpartition('\' "$@"')[0].replace("'\\''", "'")


def judged(directory: Path, reply: dict[str, Any]) -> Report:
    directory.mkdir(exist_ok=True)
    return examine(Case(deployment(directory, "ct200"), host_facts(reply)))


def test_it_is_one_small_script_for_any_posix_shell_and_python_3_9() -> None:
    assert len(script().encode()) < 64_000
    for shell in filter(None, map(shutil.which, ("dash", "bash", "busybox"))):
        words = [shell, "sh", "-n"] if shell.endswith("busybox") else [shell, "-n"]
        subprocess.run(words, input=script().encode(), check=True, timeout=20)
    tree = ast.parse(python_part(), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names | {"__future__"}


def test_it_has_nothing_that_writes() -> None:
    writers = {"write", "write_text", "write_bytes", "mkdir", "unlink", "rename", "replace_file", "symlink_to", "chmod",
               "rmdir", "rmtree", "touch", "truncate", "remove", "link", "makedirs", "chown", "utime"}  # fmt: skip
    for node in ast.walk(ast.parse(python_part())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in writers, f"line {node.lineno}: {name}"
            if name == "open":
                modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                assert set(modes) <= {"rb"}


def interpreter(version: str) -> str | None:
    """A Python of that version: beside the one that runs this, or on the PATH. What stands there must say so itself:
    a version manager's stand-in may start another one.
    """
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*{version}*/bin/python3"))
    for path in (*beside, shutil.which(f"python{version}")):
        asked = (
            [path, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
            if path
            else ["false"]
        )
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split(maxsplit=1)
        if said[:1] == [version]:
            return said[1].strip()
    return None


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_it_runs_on_the_pythons_of_hosts(host: Host, version: str) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    host.tool("python3", f'exec {found} "$@"')
    host.nvidia_smi()
    reply, _ = host.collect()
    assert reply["python"]["running"].startswith(f"{version}.")
    assert len(reply["cards"]["gpus"]) == 8
    assert reply["collector"]["unfinished"] == []


def test_a_host_without_python_is_told_as_such(host: Host, tmp_path: Path) -> None:
    for name in ("uname", "sh"):
        (host.bin / name).symlink_to(str(shutil.which(name)))
    reply, _ = host.collect(path="")
    assert reply["no_python"] == ""
    assert [f.id for f in judged(tmp_path / "w", reply).findings] == ["facts-python"]


def test_an_old_python_is_named_and_not_used(host: Host, tmp_path: Path) -> None:
    (host.bin / "uname").symlink_to(str(shutil.which("uname")))
    host.tool("python3", "echo 3.6.8; exit 1")
    reply, _ = host.collect(path="")
    (found,) = judged(tmp_path / "w", reply).findings
    assert (found.id, found.seen) == ("facts-python", "python3 3.6.8")


def test_eight_cards_are_read(host: Host) -> None:
    host.nvidia_smi(query=f"cat {host.file('x', smi_xml(PROCESS.format(pid=os.getpid())))}")
    reply, took = host.collect()
    assert took < LONGEST_S
    facts = host_facts(reply)
    assert facts.malformed == {}
    cards = facts.cards
    assert (cards.driver, cards.cuda, len(cards.gpus)) == ("580.95.05", "13.0", 8)
    first = cards.gpus[0]
    assert (first.memory_total_mib, first.memory_used_mib, first.pcie_width, first.power_limit_w) == (97887, 4, 16, 600)
    assert (first.mig, first.fabric_state, first.throttle, first.ecc_uncorrected) == (None, None, ["gpu_idle"], 0)
    (holder,) = cards.processes
    assert (holder.gpu, holder.pid, holder.memory_mib, holder.alive) == (0, os.getpid(), 321, True)
    assert set(facts.capabilities.values()) == {"12.0"} and len(facts.capabilities) == 8
    assert facts.topology.matrix["GPU0"]["GPU4"] == "SYS"
    assert facts.peers.read["GPU7"]["GPU0"] == "OK"


def test_matrices_as_nvidia_smi_draws_them() -> None:
    assert {len(row) for row in matrix(smi_topo()).values()} == {7}
    assert matrix(smi_topo())["GPU1"]["GPU2"] == "NODE"
    assert len(matrix(smi_p2p())) == 8
    with_nic = (
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV18\tPXB\t0-1\nGPU1\tNV18\t X \tSYS\t0-1\nNIC0\tPXB\tSYS\t X\n"
    )
    assert matrix(with_nic) == {"GPU0": {"GPU1": "NV18"}, "GPU1": {"GPU0": "NV18"}}
    assert matrix("") == matrix("garbage\nGPU0 GPU0\n") == {}


def test_access_control_of_a_bridge() -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")  # AER, then at 0x148
    config[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[0x14E:0x150] = (0x001D).to_bytes(2, "little")
    assert acs_control(bytes(config)) == 0x1D
    assert acs_control(bytes(config[:64])) is None  # all that a user without root may read
    assert acs_control(bytes(256)) == 0
    looped = bytearray(4096)
    looped[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert acs_control(bytes(looped)) == 0


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><nvidia_smi_log>&b;</nvidia_smi_log>'
)
HOSTILE = {
    "hangs": "sleep 300",
    "ignores signals": "trap '' TERM INT HUP; sleep 300",
    "floods": "yes 0123456789012345678901234567890123456789 | head -c 100000000",
    "floods slowly for ever": "while :; do echo again; sleep 0.01; done",
    "fails": "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
    "says nothing": "exit 0",
    "is killed": "kill -9 $$",
    "binary": "head -c 20000 /dev/urandom",
    "truncated": "head -c 3000 XML",
    "not xml": "echo '<<<<'",
    "entities": f"cat <<'E'\n{BOMB}\nE\n",
    "deep": "awk 'BEGIN { for (i = 0; i < 100000; i++) printf \"<a>\" }'",
    "escapes": "printf '\\033]0;owned\\007\\033[31m[red]\\r\\b<nvidia_smi_log><gpu id=\"x\"/></nvidia_smi_log>'",
    "numbers": "sed -e 's/97887 MiB/999999999999999999999999999999 MiB/' -e 's/41 C/nan C/' -e 's/16x/-1x/' XML",
    "many": "echo '<nvidia_smi_log>'; yes '<gpu/>' | head -n 40000; echo '</nvidia_smi_log>'",
    "lost": "sed 's/<total>97887 MiB/<total>GPU is lost/' XML",
}


@pytest.mark.alone
@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_nvidia_smi_does_is_a_finding(host: Host, tmp_path: Path, kind: str) -> None:
    host.nvidia_smi(query=HOSTILE[kind].replace("XML", str(host.file("whole", smi_xml()))))
    reply, took = host.collect()
    assert took < LONGEST_S
    assert reply["collector"]["seconds"] < 3
    text = json.dumps(reply)
    assert len(text) < 300_000
    assert "\\u001b" not in text and "\\u0007" not in text
    report = judged(tmp_path / "w", reply)
    told = {finding.id for finding in report.findings} & {"driver-missing", "gpu-count", "gpu-lost", "gpu-memory"}
    assert told or "cards" in " ".join(report.not_made.values()), report


def test_nothing_that_it_started_stays(host: Host) -> None:
    host.nvidia_smi(query=f"echo $$ >{host.home}/pid; sleep 300")
    host.collect({"limit_s": 1})
    pid = int((host.home / "pid").read_text())
    for _ in range(40):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{pid} is still there")


def test_all_matrices_may_fail_without_a_pass(host: Host, tmp_path: Path) -> None:
    host.nvidia_smi(topo="sleep 300", peers="exit 3")
    reply, _ = host.collect()
    report = judged(tmp_path / "w", reply)
    said = [finding.seen for finding in report.findings if finding.id == "facts-tools"]
    assert any("topo -m" in line for line in said) and any("topo -p2p r" in line for line in said)
    assert report.failed


def test_without_any_tool_the_rest_is_told(host: Host) -> None:
    host.tool("python3", f'exec {os.path.realpath(sys.executable)} "$@"')
    reply, _ = host.collect(path="")
    assert reply["cards"]["problem"] == "nvidia-smi is not installed"
    assert reply["os"]["kernel"] and reply["memory"]["total_kib"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_without_root_is_told_less_and_never_wrong(tmp_path: Path) -> None:
    if shutil.which("python3", path="/usr/bin:/bin") is None:
        pytest.skip("no Python that every user may run")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own directories are closed to other users
        Path(folder).chmod(0o755)
        host = Host(Path(folder))
        host.nvidia_smi()
        reply, _ = host.collect(user=65534)
    assert reply["rights"]["uid"] == 65534
    assert len(reply["cards"]["gpus"]) == 8
    report = judged(tmp_path / "w", reply)
    assert "rights-root" in {finding.id for finding in report.findings}


def test_a_run_changes_nothing(host: Host, tmp_path: Path) -> None:
    host.nvidia_smi()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    model = Path(__file__).parents[3] / "ddtree_ops/engine/pair/draft"
    host.collect({"models": [str(model)], "paths": [str(tmp_path)], "root": str(tmp_path / "absent")})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def model_at(directory: Path) -> Path:
    source = Path(__file__).parents[3] / "ddtree_ops/engine/pair/draft"
    shutil.copytree(source, directory)
    return directory


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: os.truncate(p / "model.safetensors", 100_000), "its header says"),
        (lambda p: os.truncate(p / "model.safetensors", 5), "cut short"),
        (lambda p: (p / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
        (lambda p: (p / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"{" * 400), "damaged"),
        (lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 4096), "cut short"),
        (lambda p: ((p / "model.safetensors").unlink(), os.mkfifo(p / "model.safetensors")), "no regular file"),
    ],
)
def test_weights_that_are_not_whole(host: Host, tmp_path: Path, damage: Any, said: str) -> None:
    path = model_at(tmp_path / "model")
    reply, _ = host.collect({"models": [str(path)]})
    assert reply["models"][str(path)]["problems"] == []
    damage(path)
    reply, _ = host.collect({"models": [str(path)]})
    (problem,) = reply["models"][str(path)]["problems"]
    assert said in problem


def test_shards_of_the_index_that_are_missing(host: Host, tmp_path: Path) -> None:
    path = model_at(tmp_path / "model")
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model-00002.safetensors.incomplete").write_text("")
    found = host.collect({"models": [str(path)]})[0]["models"][str(path)]
    assert (found["missing"], found["missing_count"]) == (["model-00002.safetensors"], 1)
    assert found["fetching"] == ["model-00002.safetensors.incomplete"]


def test_a_path_that_looks_like_a_key_stays_known(host: Host, tmp_path: Path) -> None:
    path = model_at(tmp_path / "models--moonshotai--Kimi-K2-Instruct-0905-hXyZ123456789")
    reply, _ = host.collect({"models": [str(path)], "paths": [str(path)]})
    assert list(reply["models"]) == list(reply["disks"]) == [str(path)]


def test_a_reply_that_is_none_is_refused() -> None:
    for output in (b"", b"[]", b"{}", b"x" * 100, b'{"format": "1"}', b'{"format": true}', b"[" * 100_000):
        with pytest.raises(Failed):
            parse(output, "h")
    with pytest.raises(Failed, match="format 2"):
        parse(b'{"format": 2}', "h")


def test_what_is_no_number_is_not_told() -> None:
    """JSON has neither; what we print of it must be JSON again."""
    assert parse(b'{"format": 1, "a": [NaN, -Infinity, 1e999, 1.5]}', "h")["a"] == [None, None, None, 1.5]


def test_the_request_names_what_the_profile_needs(tmp_path: Path) -> None:
    asked = request(deployment(tmp_path, "ct200"), limit_s=9)
    assert asked["models"] == ["/models/Kimi-K2.6", "/models/Kimi-K2.6-DFlash"]
    assert (asked["port"], asked["cuda_home"], asked["limit_s"]) == (30000, "/usr/local/cuda", 9)
    assert len(json.dumps(asked)) < 4000


def test_odd_requests_are_survived(host: Host) -> None:
    for odd in ({"models": ["/\x00"], "port": "x", "service": "../..", "limit_s": -1}, {"models": [1], "paths": [{}]}):
        reply, _ = host.collect(odd)
        assert reply["format"] == 1
