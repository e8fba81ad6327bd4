"""The main job on real hosts, through the CLI as a user types it: deploy, verify-exactness, snapshot, rollback.

The workspace is the packaged one; address, host key, user, engine base and port are all that changes. The job from
nothing to rollback has the packaged gate too; the other tests here, and those in other files of what a deploy does
besides, have a short one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.exactness import builtin_prompts
from tests.documented import documented

from .harness import TestHost

SERVICE = "sglang-k26-ddtree"
PORT = 30000
FAULT = "mask-rows-by-block-size"


class Workspace:
    """A workspace in git and the ``ddtree`` that is used in it."""

    def __init__(self, path: Path, users: dict[TestHost, str], base: str = "tiny") -> None:
        self.path, self.base = path, base
        self.program = [sys.executable, "-m", "ddtree_ops.cli"]
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "Operator")
        self.git("config", "user.email", "operator@example.net")
        self.ddtree("init", ".")
        for host, user in users.items():
            self._edit(host, user)
        for unused in {"local", "ct200", "b300"} - {host.name for host in users}:
            (path / "inventories" / f"{unused}.yaml").unlink()
        (path / "inventories" / "workspace.yaml").unlink(missing_ok=True)
        self.git("add", "-A")
        self.git("commit", "-qm", "Inventories")

    def _edit(self, host: TestHost, user: str) -> None:
        file = self.path / "inventories" / f"{host.name}.yaml"
        packaged = file if file.exists() else file.with_name("ct200.yaml")
        inventory = yaml.safe_load(packaged.read_text())
        inventory.update(
            address=host.address,
            host_key=host.hostkey,
            identity_file=str(host.identity_file),
            user=user,
            sudo=user != "root",
        )
        (name,) = inventory["services"]
        service = inventory["services"].pop(name)
        inventory["services"][SERVICE] = {**service, "base": self.base, "port": PORT, "gpus": []}
        file.write_text(yaml.safe_dump(inventory, sort_keys=False))

    @property
    def environment(self) -> dict[str, str]:
        """What ``ddtree`` runs with."""
        return {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(sys.path)}

    def ddtree(self, *words: str, code: int = 0, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run ``ddtree`` here; its exit code must be ``code``."""
        done = subprocess.run(
            [*self.program, *words],
            cwd=self.path,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            env=self.environment,
        )
        assert done.returncode == code, (
            f"ddtree {' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        """Run ``ddtree ... --json``; stdout is one document, as docs/json.md has it."""
        return documented([*words, "--json"], self.ddtree(*words, "--json", code=code).stdout)

    def git(self, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=self.path, text=True, capture_output=True, check=True)
        return done.stdout

    def commits(self) -> list[str]:
        """Subjects, newest first."""
        return self.git("log", "--format=%s").splitlines()

    def profile(self, name: str, **keys: Any) -> None:
        """Write a profile of the test's own and commit it."""
        (self.path / "inventories" / "profiles" / f"{name}.yaml").write_text(yaml.safe_dump(keys))
        self.git("add", "-A")
        self.git("commit", "-qm", f"Profile {name}")


def with_short_gate(path: Path, users: dict[TestHost, str]) -> Workspace:
    """A workspace whose gate judges every second packaged prompt, over half as many tokens.

    The context is a quarter of the pair's own: the gate tries its limit at every load, most of its work otherwise.
    """
    workspace = Workspace(path, users, base="short")
    lines = [json.dumps({"id": prompt.id, "text": prompt.text}) for prompt in builtin_prompts()[::2]]
    (path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    gate = {"max_new_tokens": 32, "prompts": "prompts.jsonl"}
    workspace.profile("short", extends="tiny", context_length=512, exactness=gate)
    return workspace


@pytest.fixture
def fresh(ct200: TestHost, b300: TestHost) -> Iterator[tuple[TestHost, TestHost]]:
    """Both hosts with empty disks."""
    for host in (ct200, b300):
        host.reset()
        host.up()
    yield ct200, b300


def server_info(host: TestHost) -> dict[str, Any]:
    """What the server itself says, asked from inside the host."""
    script = (
        f"import urllib.request as u;print(u.urlopen('http://127.0.0.1:{PORT}/server_info',timeout=10).read().decode())"
    )
    answer: dict[str, Any] = json.loads(host.sh(f'python3 -c "{script}"'))
    return answer


def main_process(host: TestHost) -> str:
    return host.sh(f"systemctl show -p MainPID --value {SERVICE}").strip()


@pytest.mark.hosts
@pytest.mark.timeout(1500)
def test_two_hosts_from_nothing_to_rollback(fresh: tuple[TestHost, TestHost], tmp_path: Path) -> None:
    """As root on ct200 and as a sudo user on b300: each command, alone and with --host all."""
    ct200, b300 = fresh
    workspace = Workspace(tmp_path, {ct200: "root", b300: "deploy"})

    # nothing there: a plan says so and writes nothing
    assert "nothing is deployed yet" in workspace.ddtree("plan", "--host", "ct200", code=3).stdout
    assert ct200.sh("ls /opt").strip() == ""

    first = workspace.json("deploy", "--host", "ct200", "--yes")["hosts"][0]["outcome"]
    assert (first["result"], first["generation"], first["verdict"]["kind"]) == ("confirmed", 1, "EXACT")
    assert first["bytes_sent"] > 0
    assert {run["concurrency"] for run in first["verdict"]["runs"]} == {1, 8}
    shown = server_info(ct200)
    assert (shown["speculative_algorithm"], shown["speculative_ddtree_budget"]) == ("DDTREE", 8)
    assert ct200.sh(f"ps -o user= -p {main_process(ct200)}").strip() == "ddtree"
    assert workspace.commits()[0].startswith(f"ct200: {SERVICE} first snapshot")

    # the same again: no change, no restart, not a byte written
    pid, tree = main_process(ct200), "find /opt/ddtree /etc/systemd/system -newermt '@{}' | wc -l"
    now = ct200.sh("date +%s").strip()
    ct200.sh("sleep 1.1")
    again = workspace.json("deploy", "--host", "ct200", "--yes")["hosts"][0]["outcome"]
    assert again["result"] == "unchanged"
    assert main_process(ct200) == pid
    assert ct200.sh(tree.format(int(now) + 1)).strip() == "0"
    workspace.ddtree("plan", "--host", "ct200")

    # b300 by --host all: ct200 stays as it is
    both = workspace.json("deploy", "--host", "all", "--yes")["hosts"]
    assert {entry["host"]: entry["outcome"]["result"] for entry in both} == {"ct200": "unchanged", "b300": "confirmed"}
    assert main_process(ct200) == pid

    # what deploy committed is what runs: nothing new
    before = workspace.commits()
    assert [entry["commit"] for entry in workspace.json("snapshot", "--host", "all")["hosts"]] == [None, None]
    assert workspace.commits() == before

    # what verify-exactness says is kept, once
    verdicts = workspace.json("verify-exactness", "--host", "all")["hosts"]
    assert [entry["verdict"]["kind"] for entry in verdicts] == ["EXACT", "EXACT"]
    assert all(entry["commit"] for entry in workspace.json("snapshot", "--host", "all")["hosts"])
    assert [entry["commit"] for entry in workspace.json("snapshot", "--host", "all")["hosts"]] == [None, None]

    other = workspace.json("deploy", "--host", "all", "--profile", "b16k4", "--yes")["hosts"]
    assert {entry["outcome"]["generation"] for entry in other} == {2}
    assert {entry["outcome"]["bytes_sent"] for entry in other} == {0}
    assert server_info(ct200)["speculative_ddtree_budget"] == 16
    assert any(subject.startswith(f"ct200: {SERVICE} budget 8 -> 16") for subject in workspace.commits())

    back = workspace.json("rollback", "--host", "all", "--yes")["hosts"]
    assert {(entry["outcome"]["generation"], entry["outcome"]["verdict"]["kind"]) for entry in back} == {(1, "EXACT")}
    assert server_info(b300)["speculative_ddtree_budget"] == 8
    workspace.ddtree("plan", "--host", "all")

    for entry in workspace.json("status", "--host", "all")["hosts"]:
        status = entry["status"]
        assert (status["state"], status["verdict"], status["budget/topk"]) == ("active", "EXACT", "8/4")
        assert status["drift"] == [] and status["unproven"] is None and float(status["accept length"]) > 2
    history = workspace.ddtree("history", "--host", "ct200").stdout
    assert "1 *" in history and "b16k4" in history
    assert "ready on http://127.0.0.1" in workspace.ddtree("logs", "--host", "ct200").stdout
    assert workspace.git("status", "--porcelain") == ""


@pytest.mark.hosts
@pytest.mark.timeout(900)
def test_mask_fault_never_stays(fresh: tuple[TestHost, TestHost], tmp_path: Path) -> None:
    """The fault this project exists for: the gate says FAIL, the deploy goes back, the old tokens are served again."""
    ct200, b300 = fresh
    workspace = with_short_gate(tmp_path, {ct200: "root", b300: "deploy"})
    workspace.profile("faulty", extends="b8k4", extra_args=["--fault", FAULT])

    # a first deploy that fails leaves a host without the service, and the evidence
    failed = workspace.ddtree("deploy", "--host", "b300", "--profile", "faulty", "--yes", code=5)
    assert "FAIL" in failed.stderr
    assert b300.sh(f"systemctl list-unit-files {SERVICE}.service --no-legend | wc -l").strip() == "0"
    assert b300.run(["pgrep", "-f", "ddtree_ops.engine"]).returncode == 1
    evidence = json.loads(b300.sh(f"cat /opt/ddtree/services/{SERVICE}/generations/1/evidence/*/verdict.json"))
    assert evidence["kind"] == "FAIL" and evidence["findings"]

    # over a proven one it comes back, and is proven to
    workspace.ddtree("deploy", "--host", "ct200", "--yes")
    workspace.ddtree("deploy", "--host", "ct200", "--profile", "faulty", "--yes", code=5)
    assert server_info(ct200)["fault"] is None
    workspace.ddtree("verify-exactness", "--host", "ct200")
    workspace.ddtree("plan", "--host", "ct200")

    # the gate alone, against a faulty engine that somebody started by hand
    unit = ct200.sh(f"cat /etc/systemd/system/{SERVICE}.service")
    unit = unit.replace('"ddtree_ops.engine"', f'"ddtree_ops.engine" "--fault" "{FAULT}"')
    assert FAULT in unit
    ct200.put(f"/etc/systemd/system/{SERVICE}.service", unit.encode())
    ct200.sh(f"systemctl daemon-reload && systemctl restart {SERVICE} && sleep 8")
    verdict = workspace.json("verify-exactness", "--host", "ct200", code=4)["hosts"][0]["verdict"]
    assert verdict["kind"] == "FAIL"
    assert "was edited on the host" in workspace.ddtree("plan", "--host", "ct200", code=3).stdout
    workspace.ddtree("deploy", "--host", "ct200", "--yes", code=1)
    workspace.ddtree("deploy", "--host", "ct200", "--yes", "--overwrite")
    workspace.ddtree("verify-exactness", "--host", "ct200")


@pytest.mark.hosts
@pytest.mark.timeout(900)
def test_adopt_keeps_a_hand_made_unit_byte_for_byte(fresh: tuple[TestHost, TestHost], tmp_path: Path) -> None:
    """A unit somebody wrote, with a drop-in, becomes generation 0; rollback --to 0 restores both."""
    ct200, _ = fresh
    workspace = with_short_gate(tmp_path, {ct200: "root"})
    path = f"/etc/systemd/system/{SERVICE}.service"
    unit = b"[Unit]\nDescription=by hand  \n\n[Service]\nExecStart=/bin/sleep infinity\n"
    unit += b"[Install]\nWantedBy=multi-user.target\n"
    dropin = b"[Service]\nEnvironment=A=b\n# no newline at the end"
    ct200.put(path, unit)
    ct200.put(f"{path}.d/10-own.conf", dropin)
    ct200.sh(f"systemctl daemon-reload && systemctl enable --now {SERVICE} 2>/dev/null")

    assert "ddtree did not make it" in workspace.ddtree("plan", "--host", "ct200", code=3).stdout
    workspace.ddtree("deploy", "--host", "ct200", "--yes", code=1)
    assert ct200.run(["cat", path]).stdout == unit

    workspace.ddtree("deploy", "--host", "ct200", "--yes", "--adopt")
    assert server_info(ct200)["speculative_ddtree_budget"] == 8
    workspace.ddtree("plan", "--host", "ct200")

    workspace.ddtree("rollback", "--host", "ct200", "--to", "0", "--yes")
    assert ct200.run(["cat", path]).stdout == unit
    assert ct200.run(["cat", f"{path}.d/10-own.conf"]).stdout == dropin
    assert ct200.sh(f"systemctl is-active {SERVICE}; systemctl is-enabled {SERVICE}").split() == ["active", "enabled"]


@pytest.mark.hosts
def test_unknown_and_changed_host_keys_are_refused(ct200: TestHost, b300: TestHost, tmp_path: Path) -> None:
    """No key in the inventory: exit 6 and the line to add. Another host's key: exit 6, and nothing was sent."""
    workspace = Workspace(tmp_path, {ct200: "root"})
    file = workspace.path / "inventories" / "ct200.yaml"
    inventory = yaml.safe_load(file.read_text())
    key = inventory.pop("host_key")
    file.write_text(yaml.safe_dump(inventory))
    refused = workspace.ddtree("plan", "--host", "ct200", code=6)
    assert f'host_key: "{key}"' in refused.stderr or f"host_key: {key}" in refused.stderr

    file.write_text(yaml.safe_dump({**inventory, "host_key": b300.hostkey}))
    changed = workspace.ddtree("plan", "--host", "ct200", code=6)
    assert changed.stderr.count("SHA256:") >= 2
