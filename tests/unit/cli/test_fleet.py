"""Several hosts: in the workspace's order and width, stopped by the first failure, told by the worst exit code."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.cli.fleet import each, host_names, survey
from ddtree_ops.cli.screen import Screen
from ddtree_ops.errors import Failed, RolledBack, UsageError
from ddtree_ops.model import Deployment, Workspace, init_workspace, load_workspace, resolve

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    init_workspace(tmp_path)
    inventories = tmp_path / "inventories"
    local = (inventories / "local.yaml").read_text()
    for path in inventories.glob("*.yaml"):
        path.unlink()
    for name in NAMES:
        (inventories / f"{name}.yaml").write_text(local)
    return load_workspace(tmp_path)


def fleet(workspace: Workspace, text: str) -> Workspace:
    (workspace.path / "inventories" / "workspace.yaml").write_text(text)
    return load_workspace(workspace.path)


def deployments(workspace: Workspace) -> list[Deployment]:
    return [resolve(workspace, name, None, None) for name in workspace.hosts]


def test_order_groups_and_width_come_from_the_workspace(workspace: Workspace) -> None:
    loaded = fleet(workspace, "order: [c, a]\ngroups:\n  canary: [d, b]\nmax_unavailable: 2\n")
    assert list(loaded.hosts) == ["c", "a", "b", "d"]
    assert host_names(loaded, ["all"]) == ["c", "a", "b", "d"]
    assert host_names(loaded, ["canary"]) == ["d", "b"]
    assert host_names(loaded, ["a", "canary", "b"]) == ["a", "d", "b"]
    assert loaded.max_unavailable == 2
    with pytest.raises(UsageError) as which:
        host_names(loaded, None)
    assert "canary" in which.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("order: [a, x]\n", "order[1]: no host 'x'"),
        ("order: [a, a]\n", "written twice"),
        ("groups: {canary: [x]}\n", "no host 'x'"),
        ("groups: {a: [b]}\n", "has a host's name"),
        ("groups: {all: [b]}\n", "not a group's name"),
        ("groups: {g: []}\n", "groups.g"),
        ("max_unavailable: 0\n", "max_unavailable"),
        ("max_unavailabel: 2\n", "did you mean 'max_unavailable'"),
    ],
)
def test_a_wrong_workspace_file_is_refused(workspace: Workspace, text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        fleet(workspace, text)
    assert said in refused.value.message and "workspace.yaml:1" in refused.value.message


class Acts:
    """Acts on hosts, noting how many at once."""

    def __init__(self, failing: dict[str, Exception] | None = None) -> None:
        self.failing, self.now, self.most = failing or {}, 0, 0
        self.begun: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, deployment: Deployment) -> tuple[int, dict[str, Any]]:
        name = deployment.host.name
        with self.lock:
            self.begun.append(name)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.1)
        with self.lock:
            self.now -= 1
        if name in self.failing:
            raise self.failing[name]
        return 0, {"summary": "ok"}


@pytest.mark.parametrize("width", [1, 2, 3])
def test_no_more_hosts_at_once_than_the_width(workspace: Workspace, width: int) -> None:
    act = Acts()
    assert each(Screen(), deployments(workspace), act, width=width) == 0
    assert sorted(act.begun) == list(NAMES) and act.most == width


@pytest.mark.parametrize("width", [1, 2])
def test_the_first_failure_stops_the_rest(workspace: Workspace, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    act = Acts({"a": RolledBack("a: no"), "b": Failed("b: no")})
    code = each(Screen(json_=True), deployments(workspace), act, stop_at_first_failure=True, width=width)
    assert code == 5 and act.begun == list(NAMES[:width])
    told = json.loads(capsys.readouterr().out)
    assert [row.get("exit_code") for row in told["hosts"]] == [5, *([1] if width == 2 else [None]), None, None]
    assert [bool(row.get("skipped")) for row in told["hosts"]] == [index >= width for index in range(4)]
    assert told["ok"] is False


def test_going_on_the_worst_counts(workspace: Workspace) -> None:
    act = Acts({"b": Failed("b: no")})
    assert each(Screen(), deployments(workspace), act, width=2) == 1
    assert sorted(act.begun) == list(NAMES)


def test_hosts_are_looked_at_at_once_and_shown_in_order(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    together = threading.Barrier(len(NAMES))  # passed only when all are looked at at the same time

    def look(deployment: Deployment) -> str:
        together.wait(30)
        if deployment.host.name == "b":
            raise Failed("b: is not there")
        return deployment.host.name

    shown = []

    def show(deployment: Deployment, found: str) -> tuple[int, dict[str, Any]]:
        shown.append(found)
        return 3, {"found": found}

    assert survey(Screen(json_=True), deployments(workspace), look, show) == 1
    assert shown == ["a", "c", "d"]
    told = json.loads(capsys.readouterr().out)["hosts"]
    assert [(row["host"], row["exit_code"]) for row in told] == [("a", 3), ("b", 1), ("c", 3), ("d", 3)]


def test_a_fault_of_ours_in_a_look_is_no_finding(workspace: Workspace) -> None:
    def look(deployment: Deployment) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        survey(Screen(json_=True), deployments(workspace), look, lambda deployment, found: (0, {}))
