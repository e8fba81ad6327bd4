"""Command lines that cannot be meant, made from every command's own options: exit 2, one message, no host contacted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ddtree_ops.cli.root  # noqa: F401  what it registers
from ddtree_ops.cli.app import app
from ddtree_ops.cli.commands import COMMANDS, load
from ddtree_ops.model import init_workspace


def leaves() -> Iterator[tuple[list[str], Any]]:
    """Every command with its words, those of a group one by one."""
    for name in COMMANDS:
        command = load(name)
        inner = getattr(command, "commands", {})
        for word, leaf in (inner or {"": command}).items():
            yield [name, *([word] if word else [])], leaf


def lines() -> list[list[str]]:
    found = []
    for words, command in leaves():
        found += [[*words, "--no-such-option"], [*words, "a", "b", "c", "one word too many"]]
        for option in command.params:
            flag = max(option.opts, key=len)
            if not flag.startswith("--"):
                continue
            if getattr(option, "is_flag", False):
                found.append([*words, f"{flag}=maybe"])
            else:
                found.append([*words, flag])
            kind = type(option.type).__name__
            if "Int" in kind or "Float" in kind:
                found += [[*words, flag, wrong] for wrong in ("many", "", "1e999x", "-99999999999")]
            if flag in ("--host", "--service", "--profile"):
                found += [[*words, flag, wrong] for wrong in ("no-such-name", "", "../../etc", "ct200\n")]
    return found


LINES = lines()


def test_they_are_many() -> None:
    assert len(LINES) > 200


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bad-lines")
    init_workspace(place)
    return place


@pytest.mark.parametrize("name", [*COMMANDS])
def test_each_is_refused_with_a_message(name: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("PATH", "/nonexistent")  # whoever would dial, build or start something fails otherwise than by 2
    before = sorted(path for path in workspace.rglob("*"))
    for words in (line for line in LINES if line[0] == name):
        done = CliRunner().invoke(app, words, prog_name="ddtree")
        assert isinstance(done.exception, SystemExit), (words, done.exception)
        assert done.exit_code == 2 and "rror: " in done.stderr and "Traceback" not in done.output, (words, done.output)
    assert sorted(path for path in workspace.rglob("*")) == before


def test_with_json_it_is_a_document_too(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    done = CliRunner().invoke(app, ["plan", "--host", "no-such-name", "--json"], prog_name="ddtree")
    assert done.exit_code == 2 and json.loads(done.stdout)["error"]["exit_code"] == 2
