"""The command line as a user types it, where no host is needed: refusals, exit codes, JSON, laziness."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.cli.fleet import worst
from ddtree_ops.cli.history import told
from ddtree_ops.cli.logs import new_lines
from ddtree_ops.cli.power import outcome
from ddtree_ops.model import init_workspace
from tests.documented import documented

COMMANDS = [
    "init",
    "demo",
    "hosts",
    "doctor",
    "build",
    "export",
    "patch",
    "render",
    "plan",
    "deploy",
    "rollback",
    "status",
    "logs",
    "verify-exactness",
    "snapshot",
    "history",
    "releases",
    "prune",
    "stop",
    "start",
    "restart",
    "recover",
    "unlock",
]


def ddtree(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("DDTREE_WORKSPACE", None)
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_ops.cli", *words],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    if "--json" in words:
        documented(words, done.stdout)
    return done


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    init_workspace(tmp_path)
    return tmp_path


def test_help_names_every_command(tmp_path: Path) -> None:
    shown = ddtree(tmp_path, "--help")
    assert shown.returncode == 0
    for name in COMMANDS:
        assert f" {name} " in shown.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(tmp_path: Path, name: str) -> None:
    assert ddtree(tmp_path, name, "--help").returncode == 0


def test_outside_a_workspace_nothing_is_contacted(tmp_path: Path) -> None:
    refused = ddtree(tmp_path, "plan")
    assert refused.returncode == 2
    assert "inventories" in refused.stderr and "Traceback" not in refused.stderr


def test_errors_are_one_json_document(tmp_path: Path) -> None:
    refused = ddtree(tmp_path, "status", "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["exit_code"] == 2


@pytest.mark.parametrize("words", [["deploy", "--bogus"], ["rollback", "--to", "x"], ["unlock"], ["nonsense"]])
def test_wrong_options_are_one_json_document(tmp_path: Path, words: list[str]) -> None:
    refused = ddtree(tmp_path, *words, "--json")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert json.loads(refused.stdout)["error"]["exit_code"] == 2


def test_an_unknown_host_is_named_with_the_known_ones(workspace: Path) -> None:
    refused = ddtree(workspace, "plan", "--host", "ct20")
    assert refused.returncode == 2
    assert "ct200" in refused.stderr


def test_a_bad_inventory_is_refused_with_its_line(workspace: Path) -> None:
    file = workspace / "inventories" / "ct200.yaml"
    file.write_text(file.read_text().replace("port: 30000", "prot: 30000"))
    refused = ddtree(workspace, "plan", "--host", "ct200")
    assert refused.returncode == 2
    assert "ct200.yaml:" in refused.stderr and "prot" in refused.stderr and "'port'" in refused.stderr


def test_a_host_without_a_key_is_never_contacted(workspace: Path) -> None:
    """The packaged ct200 has no host key: TEST-NET address, so a try to connect would hang instead."""
    file = workspace / "inventories" / "ct200.yaml"
    inventory = yaml.safe_load(file.read_text())
    service = inventory["services"]["sglang-k26-ddtree"]
    service.update(base="tiny", gpus=[])
    inventory["address"] = "127.0.0.1"
    inventory["port"] = 1
    file.write_text(yaml.safe_dump(inventory))
    refused = ddtree(workspace, "plan", "--host", "ct200")
    assert refused.returncode == 6
    assert "Traceback" not in refused.stderr


def test_render_shows_the_unit_of_ct200(workspace: Path) -> None:
    shown = ddtree(workspace, "render", "--host", "ct200", "--json")
    assert shown.returncode == 0, shown.stderr
    files = json.loads(shown.stdout)["hosts"][0]["files"]
    assert "--speculative-ddtree-budget" in files["unit"] and "DeviceAllow=char-nvidia*" in files["unit"]


def test_without_a_terminal_a_change_needs_yes(workspace: Path) -> None:
    refused = ddtree(workspace, "stop", "--host", "local")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr


def test_a_plan_file_leaves_nothing_else_to_say(workspace: Path, tmp_path: Path) -> None:
    """What is no plan file is refused with its name, and so are options beside one."""
    refused = ddtree(workspace, "deploy", str(tmp_path / "none.json"), "--yes")
    assert refused.returncode == 2 and "none.json" in refused.stderr
    for more in (["--host", "local"], ["--profile", "ar"], ["--overwrite"]):
        both = ddtree(workspace, "deploy", "x.json", "--yes", *more)
        assert both.returncode == 2 and "ddtree plan -o" in both.stderr


def test_the_worst_exit_code_wins() -> None:
    order = [9, 5, 4, 8, 1, 7, 6, 3, 0]
    for better, other in itertools.combinations(order, 2):
        assert worst([other, better]) == better
    assert worst([]) == 0


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        (["a", "b"], ["a", "b"], []),
        (["a", "b"], ["b", "c"], ["c"]),
        (["a", "a"], ["a", "a", "a"], ["a"]),
        (["a"], ["x", "y"], ["x", "y"]),
        ([], ["x"], ["x"]),
    ],
)
def test_following_a_log_shows_each_line_once(before: list[str], now: list[str], new: list[str]) -> None:
    assert new_lines(before, now) == new


def test_following_ends_with_its_reader() -> None:
    code = "import time\nfrom ddtree_ops.cli.logs import require_reader\nprint('x', flush=True)\n"
    code += "require_reader()\nprint('y', flush=True)\ntime.sleep(0.5)\nrequire_reader()\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as done:
        assert done.stdout is not None and done.stderr is not None
        assert (done.stdout.readline(), done.stdout.readline()) == (b"x\n", b"y\n")
        done.stdout.close()
        assert b"BrokenPipeError" in done.stderr.read()


@pytest.mark.parametrize(
    ("words", "completing"),
    [(["--help"], ""), (["--version"], ""), ([], "ddtree pl"), ([], "ddtree status --h")],
)
def test_starting_imports_nothing_heavy(words: list[str], completing: str) -> None:
    """What an operator waits for before anything is asked of a host; rich is for tables and bars."""
    heavy = {"fabric", "paramiko", "jinja2", "yaml", "rich.table", "rich.console", "torch", "httpx", "msgspec"}
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: sys.stderr.write(','.join(sorted({heavy!r} & set(sys.modules)))))\n"
        "from ddtree_ops.cli import main\n"
        f"sys.argv = ['ddtree', *{words!r}]\n"
        "main()\n"
    )
    asked = {"_DDTREE_COMPLETE": "complete_bash", "COMP_WORDS": completing, "COMP_CWORD": str(completing.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(asked if completing else {})},
    )
    assert done.stderr == "" and done.stdout, done.stderr
    if completing:
        assert done.stdout.split() == (["plan"] if completing.endswith("pl") else ["--host", "--help"])


def test_the_listed_lines_are_the_commands_own() -> None:
    """--help lists from a table what each command says of itself; all that a file registers is listed."""
    import ddtree_ops.cli  # noqa: F401  the root
    from ddtree_ops.cli.commands import COMMANDS, EXAMPLES, GROUPS, load, registered

    for name, entry in COMMANDS.items():
        assert load(name).get_short_help_str(500).rstrip(".") == entry.line.rstrip("."), name
    assert set(registered) == set(COMMANDS)
    assert sorted(itertools.chain(*GROUPS.values())) == sorted(COMMANDS)
    assert {words.split()[1] for words, _ in EXAMPLES} <= set(COMMANDS)
    files = {path.stem for path in (Path(__file__).parents[3] / "ddtree_ops/cli").glob("*.py")}
    assert {entry.module for entry in COMMANDS.values()} <= files


@pytest.mark.parametrize(
    ("verb", "reply", "code", "words"),
    [
        ("stop", {"active": {"state": "inactive"}}, 0, "inactive"),
        ("start", {"active": {"state": "failed"}}, 1, "failed"),
        ("restart", {"active": {"state": "active"}}, 0, "active"),
        ("recover", {"result": "nothing", "generation": 3}, 0, "nothing to recover, generation 3"),
        ("recover", {"result": "recovered", "generation": None}, 0, "nothing is deployed"),
        ("unlock", {"released": True, "was": None, "unfinished": None}, 0, "nobody"),
        (
            "unlock",
            {"released": False, "was": {"who": "ann", "txn": "t1"}, "unfinished": "t1"},
            7,
            "still locked by ann",
        ),
    ],
)
def test_what_the_host_answered_is_what_is_said(verb: str, reply: dict[str, Any], code: int, words: str) -> None:
    got, said = outcome(verb, reply)
    assert got == code and words in said


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"action": "deploy", "target": 4, "end": "confirmed", "reason": ""}, "deploy to 4: confirmed"),
        ({"action": "deploy", "target": 4, "end": None}, "deploy to 4: unfinished"),
        ({"note": "stop", "end": None, "who": "ann", "reason": None}, "stop by ann"),
    ],
)
def test_history_says_what_each_transaction_was(row: dict[str, Any], words: str) -> None:
    assert told(row) == words


def test_a_reader_that_went_away_stops_nothing() -> None:
    """``ddtree deploy 2>&1 | head -1``: the client must stay, or the host goes back when its lease ends."""
    code = (
        "import sys\n"
        "from ddtree_ops.cli.screen import Screen\n"
        "screen = Screen()\n"
        "for n in range(500):\n"
        "    screen.step(f'step {n}')\n    screen.say(f'line {n}')\n    screen.table('t', ['a'], [['b' * 99]])\n"
        "sys.exit(42)\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout is not None
    done.stdout.readline()
    done.stdout.close()
    assert done.wait(60) == 42


@pytest.mark.parametrize(("verb", "hosts"), [("status", ["ct200"]), ("plan", ["ct200", "b300"])])
def test_ctrl_c_is_one_json_document_too(workspace: Path, verb: str, hosts: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never says SSH-
        for name in hosts:
            file = workspace / "inventories" / f"{name}.yaml"
            inventory = yaml.safe_load(file.read_text())
            inventory.update(address="127.0.0.1", port=silent.getsockname()[1])
            file.write_text(yaml.safe_dump(inventory))
        client = subprocess.Popen(
            [sys.executable, "-m", "ddtree_ops.cli", verb, *(f"--host={name}" for name in hosts), "--json"],
            cwd=workspace,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        silent.settimeout(30)
        connection, _ = silent.accept()
        time.sleep(0.3)
        client.send_signal(signal.SIGINT)
        out, err = client.communicate(timeout=30)
        connection.close()
    assert client.returncode == 130 and b"Traceback" not in err
    assert [row["error"]["exit_code"] for row in json.loads(out)["hosts"]] == [130] * len(hosts)


def test_ctrl_c_while_modules_are_imported_is_told_in_a_line() -> None:
    program = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from ddtree_ops.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
