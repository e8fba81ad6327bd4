"""Where the output goes: full disks, encodings that lack letters, narrow terminals."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from .test_cli import workspace  # noqa: F401  a fixture


def run(cwd: Path, words: list[str], stdout: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    with Path(stdout or os.devnull).open("w") as sink:
        return subprocess.run(
            [sys.executable, "-m", "ddtree_ops.cli", *words],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink if stdout else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--list"], ["hosts", "--workspace", "."]])
def test_a_full_disk_ends_nothing_and_is_said(workspace: Path, words: list[str]) -> None:  # noqa: F811
    for other in ("b300", "ct200"):
        (workspace / f"inventories/{other}.yaml").unlink()
    done = run(workspace, words, "/dev/full")
    assert done.returncode == 0
    assert done.stderr.count("No space left") == 1 and "Traceback" not in done.stderr


def test_a_document_that_could_not_be_written_is_no_success(workspace: Path) -> None:  # noqa: F811
    done = run(workspace, ["doctor", "--json"], "/dev/full")
    assert done.returncode == 1
    assert "could not be written to stdout" in done.stderr and "Traceback" not in done.stderr


def test_what_the_encoding_lacks_is_escaped(workspace: Path) -> None:  # noqa: F811
    name = {"PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    (workspace / "inventories/profiles/odd.yaml").write_text("extends: b8k4\nenv: {WORD: 'naïve'}\n")
    done = run(workspace, ["render", "--profile", "odd"], **name)
    assert done.returncode == 0 and "\\xefve" in done.stdout, done.stderr
    document = run(workspace, ["render", "--profile", "odd", "--json"], **name)
    assert "na\\u00efve" in document.stdout or "na\\\\u00efve" in document.stdout
    json.loads(document.stdout)


def test_no_name_is_cut_on_a_narrow_terminal(workspace: Path) -> None:  # noqa: F811
    done = run(workspace, ["doctor", "--list"], COLUMNS="40")
    assert done.returncode == 0 and "…" not in done.stdout and "..." not in done.stdout


def test_a_live_table_on_a_narrow_terminal_says_the_problem(workspace: Path) -> None:  # noqa: F811
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "40", "TERM": "xterm"}
    words = [sys.executable, "-m", "ddtree_ops.cli", "status", "--watch", "--count", "1"]
    try:
        subprocess.run(words, cwd=workspace, env=environment, stdin=theirs, stdout=theirs, timeout=60, check=False)
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "refused" in shown and "queued" not in shown and "\u2026" not in shown


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_a_message_and_its_place_shows_on_request(workspace: Path, debug: bool) -> None:  # noqa: F811
    code = (
        "import sys; import ddtree_ops.cli.fleet as fleet\n"
        "def broken(*_): raise ZeroDivisionError('seven by nought')\n"
        "fleet.load_workspace = broken\n"
        f"sys.argv = ['ddtree', *{['--debug'] if debug else []!r}, 'plan', '--json']\n"
        "from ddtree_ops.cli import main; main()\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "DDTREE_DEBUG"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=workspace, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "seven by nought" in done.stderr
    assert ("Traceback" in done.stderr) is debug
    if not debug:
        told = json.loads(done.stdout)["error"]
        assert told["kind"] == "Bug" and "ZeroDivisionError: seven by nought" in told["message"]
        assert "ddtree status" in told["hint"]
