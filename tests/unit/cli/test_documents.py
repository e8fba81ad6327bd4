"""docs/json.md is what comes out: here of commands that need no host, in their own tests of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.cli import documents
from ddtree_ops.cli.commands import COMMANDS
from tests.documented import command_of, documented

from .test_cli import ddtree, workspace  # noqa: F401  a fixture

CHECKOUT = Path(__file__).parents[3]
GOOD = {"ok": True, "hosts": [{"host": "a", "service": "s", "exit_code": 0, "summary": "nothing", "plan": {}}]}
ERROR = {"kind": "Failed", "exit_code": 1, "message": "m", "hint": ""}


def test_the_page_is_made_of_the_table() -> None:
    assert (CHECKOUT / "docs/json.md").read_text(encoding="utf-8") == documents.markdown(), (
        "python -m ddtree_ops.cli.documents > docs/json.md"
    )


def test_every_command_has_its_document() -> None:
    named = {name.partition(" ")[0] for name in (*documents.ROWS, *documents.WHOLE)}
    assert named == set(COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        ("render", "--host", "ct200"),
        ("render", "--host", "nowhere"),
        ("status", "--host", "local"),
        ("plan", "--host", "local"),
        ("history", "--host", "local"),
        ("hosts",),
        ("doctor", "--list"),
        ("help",),
        ("help", "faq"),
        ("patch", "check"),
        ("export", "slurm", "--host", "ct200"),
    ],
    ids=" ".join,
)
def test_what_comes_out_is_what_is_said(workspace: Path, words: tuple[str, ...]) -> None:  # noqa: F811
    """`ddtree` itself holds every document of these tests to the page."""
    if words == ("hosts",):
        for host in ("ct200", "b300"):
            (workspace / f"inventories/{host}.yaml").unlink()
        (workspace / "inventories/workspace.yaml").unlink()
    ddtree(workspace, *words, "--json")


def test_init_says_what_it_wrote(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_ops.cli", "init", str(tmp_path / "new"), "--json"],
        capture_output=True,
        text=True,
    )
    assert documented(["init"], done.stdout)["files"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ok": 1}, "no object with ok"),
        ({"hosts": {}}, "hosts is {}, not list"),
        ({"more": 1}, "more is not said"),
        ({"hosts": [{**GOOD["hosts"][0], "exit_code": True}]}, "hosts[].exit_code is True, not integer"),
        ({"hosts": [{**GOOD["hosts"][0], "outcome": {}}]}, "hosts[].outcome is not said"),
        ({"hosts": [{"host": "a", "service": "s"}]}, "hosts[]: exactly one of exit_code and skipped"),
        ({"hosts": [{"service": "s", "exit_code": 0}]}, "hosts[].host is missing"),
        ({"hosts": [{**GOOD["hosts"][0], "error": {**ERROR, "hint": None}}]}, "hosts[].error.hint is None, not text"),
    ],
)
def test_what_is_otherwise_is_found(change: dict[str, Any], said: str) -> None:
    assert documents.faults("plan", GOOD) == []
    assert said in documents.faults("plan", {**GOOD, **change})


def test_a_failure_as_a_whole_is_known() -> None:
    assert documents.faults("tune", {"ok": False, "error": ERROR}) == []
    assert documents.faults("tune", {"ok": False, "error": {"kind": "Failed"}}) != []
    assert documents.faults("tune", json.loads("[]")) == ["no object with ok"]
    assert command_of(["status", "--host", "x", "--watch"]) == "status --watch"
    assert command_of(["patch", "check", "--patches", "p"]) == "patch check"
