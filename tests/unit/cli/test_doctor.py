"""``ddtree doctor`` and ``ddtree status --watch`` as a user types them: reports, exit codes, JSON, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.engine_pair import PAIR

from ..doctor.recorded import load, sick_reply
from ..engine.process import Engine, tree
from .test_cli import ddtree, workspace  # noqa: F401  a fixture


def facts(path: Path, name: str) -> str:
    file = path / f"{name}.json"
    file.write_text(json.dumps(sick_reply(name)))
    return str(file)


def test_a_finding_has_all_an_operator_needs(workspace: Path) -> None:  # noqa: F811
    done = ddtree(workspace, "doctor", "--host", "b300", "--facts", facts(workspace, "fabric-version"))
    assert done.returncode == 1
    for line in ("ERROR fabric-version", "seen     fabric manager 580.82.07, driver 580.95.05", "expected one version"):
        assert line in done.stdout
    assert "systemctl restart nvidia-fabricmanager" in done.stdout and "1 error, " in done.stdout


def test_json_is_one_document_and_warnings_end_well(workspace: Path) -> None:  # noqa: F811
    given = facts(workspace, "no-persistence")
    done = ddtree(workspace, "doctor", "--host", "b300", "--facts", given, "--json")
    assert done.returncode == 0
    (host,) = json.loads(done.stdout)["hosts"]
    (found,) = host["doctor"]["findings"]
    assert (found["id"], found["severity"]) == ("gpu-persistence", "warning")
    assert {"seen", "expected", "do", "reference", "group"} <= set(found)
    assert "gpu-ecc" in host["doctor"]["passed"]
    assert ddtree(workspace, "doctor", "--host", "b300", "--facts", given, "--skip", "GPUs").stdout.endswith(
        " passed\n"
    )


def test_a_hostile_host_steers_neither_terminal_nor_json(workspace: Path) -> None:  # noqa: F811
    """Given escapes, half a surrogate pair and a forged line in the facts, they are shown, harmless."""
    reply = sick_reply("no-persistence")
    reply["collector"]["problems"] = [{"part": "a\x9b\x7f\ud800", "problem": "x\n0 errors, 99 passed\x1b[2J"}]
    reply["collector"]["seconds"] = float("nan")
    given = workspace / "hostile.json"
    given.write_text(json.dumps(reply))
    shown = ddtree(workspace, "doctor", "--host", "b300", "--facts", str(given))
    document = ddtree(workspace, "doctor", "--host", "b300", "--facts", str(given), "--json")
    assert "Traceback" not in shown.stderr + document.stderr
    assert not {"\x1b", "\x9b", "\x7f"} & {*shown.stdout, *document.stdout}
    assert not [line for line in shown.stdout.splitlines() if line.startswith("0 errors")]
    json.loads(document.stdout, parse_constant=pytest.fail)


def test_facts_without_end_are_refused(workspace: Path) -> None:  # noqa: F811
    done = ddtree(workspace, "doctor", "--host", "b300", "--facts", "/dev/zero")
    assert done.returncode == 2 and "no facts are" in done.stderr


def test_a_silenced_finding_is_shown_with_its_reason(workspace: Path) -> None:  # noqa: F811
    over = {"extends": "b8k4", "checks": {"fabric-version": {"severity": "off", "reason": "vendor's odd build"}}}
    (workspace / "inventories/profiles/odd.yaml").write_text(yaml.safe_dump(over))
    given = facts(workspace, "fabric-version")
    done = ddtree(workspace, "doctor", "--host", "b300", "--profile", "odd", "--facts", given)
    assert done.returncode == 0
    assert "silenced fabric-version: fabric manager 580.82.07" in done.stdout and "vendor's odd build" in done.stdout


def test_a_profile_that_cannot_work_is_refused_at_plan_with_rule_and_source(workspace: Path) -> None:  # noqa: F811
    over = {"extends": "b8k4", "extra_args": ["--moe-runner-backend", "deep_gemm"]}
    (workspace / "inventories/profiles/wrong.yaml").write_text(yaml.safe_dump(over))
    done = ddtree(workspace, "render", "--host", "ct200", "--profile", "wrong")
    assert done.returncode == 2
    assert "moe-deep-gemm" in done.stderr and "configurer.py" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--only", "gpu-ec"], "did you mean 'gpu-ecc'"), (["--only", "all-reduce"], "say --active as well"),
     (["--facts", "absent.json", "--host", "b300"], "No such file"),
     (["--host", "all", "--save", "x"], "about one host"),
     (["--facts", "inventories/b300.yaml", "--host", "b300"], "no JSON document")],
)  # fmt: skip
def test_refusals(workspace: Path, words: list[str], said: str) -> None:  # noqa: F811
    done = ddtree(workspace, "doctor", *words)
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr


def test_this_machine_and_its_facts(workspace: Path, tmp_path: Path) -> None:  # noqa: F811
    """The real collector on this machine, which the reference engine fits; then its facts once more, offline."""
    saved = tmp_path / "facts.json"
    done = ddtree(workspace, "doctor", "--host", "local", "--patience", "20", "--save", str(saved))
    assert done.returncode == 0, done.stdout + done.stderr
    kept: dict[str, Any] = json.loads(saved.read_text())
    assert kept["format"] == 1 and kept["collector"]["unfinished"] == []
    again = ddtree(workspace, "doctor", "--host", "local", "--facts", str(saved))
    assert again.stdout == done.stdout


def test_lists_need_no_workspace(tmp_path: Path) -> None:
    assert "tree-verify" in ddtree(tmp_path, "doctor", "--list").stdout
    assert ddtree(tmp_path, "doctor", "--collector").stdout.startswith("#!/bin/sh\n")


def test_a_live_look(workspace: Path, tmp_path: Path) -> None:  # noqa: F811
    """Given a real engine that works, two looks tell its tokens and accept length; given none, they say so."""
    engine = Engine(tmp_path / "log", *tree(PAIR)).wait_ready()
    inventory = workspace / "inventories" / "local.yaml"
    inventory.write_text(inventory.read_text().replace("30100", str(engine.client.base_url.port)))
    words = ("status", "--host", "local", "--watch", "--count", "2", "--interval", "0.5", "--json")
    try:
        sampling = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
        engine.generate(input_ids=[5, 6, 7, 8], sampling_params=sampling)
        first, second = json.loads(ddtree(workspace, *words).stdout)["looks"]
        assert first["problem"] == second["problem"] == ""
        assert first["accept_length"] >= 1 and first["running"] == 0
        assert second["tokens_s"] == 0.0  # by the counter: nothing came between the looks
        shown = ddtree(workspace, *words[:-1])
        assert shown.stdout.count("local tiny: ") == 2 and "accept length" in shown.stdout
    finally:
        engine.close()
    gone = json.loads(ddtree(workspace, *words).stdout)["looks"]
    assert all(look["problem"].startswith("/metrics: ") for look in gone)


def test_a_live_look_without_an_end_is_no_document(workspace: Path) -> None:  # noqa: F811
    done = ddtree(workspace, "status", "--host", "local", "--watch", "--json")
    assert done.returncode == 2 and "--count" in done.stderr


@pytest.mark.parametrize("words", [["doctor"], ["plan"], ["deploy", "--yes"], ["hosts"], ["render"]])
@pytest.mark.parametrize(
    ("check", "severity", "said"),
    [("gpu-powr", "error", "did you mean 'gpu-power'"), ("moe-deep-gemm", "info", "info means nothing for it")],
)
def test_a_check_that_cannot_be_meant_is_refused_by_file_and_line_before_any_host(
    workspace: Path,  # noqa: F811
    words: list[str],
    check: str,
    severity: str,
    said: str,
) -> None:
    (workspace / "inventories/profiles/odd.yaml").write_text(
        f"extends: b8k4\nchecks:\n  {check}: {{severity: {severity}, reason: r}}\n"
    )
    done = ddtree(workspace, *words)
    assert done.returncode == 2 and said in done.stderr
    assert f"inventories/profiles/odd.yaml:3: checks.{check}: " in done.stderr


def test_a_silenced_arch_rule_is_shown_with_its_reason_everywhere(workspace: Path) -> None:  # noqa: F811
    file = workspace / "inventories/profiles/odd.yaml"
    file.write_text("extends: b8k4\nextra_args: [--moe-runner-backend, deep_gemm]\n")
    hint = ddtree(workspace, "render", "--host", "ct200", "--profile", "odd").stderr.partition("in it `")[2]
    file.write_text(file.read_text() + hint.partition("`")[0].replace("WHY", "a patched kernel"))
    shown = ddtree(workspace, "render", "--host", "ct200", "--profile", "odd")
    assert shown.returncode == 0 and "moe-deep-gemm is silenced (a patched kernel)" in shown.stderr
    healthy = workspace / "facts.json"
    healthy.write_text(json.dumps(load("healthy", "ct200")))
    judged = ddtree(workspace, "doctor", "--host", "ct200", "--profile", "odd", "--facts", str(healthy))
    assert judged.returncode == 0 and "silenced moe-deep-gemm" in judged.stdout and "a patched kernel" in judged.stdout


def test_a_look_at_a_service_that_does_not_answer_is_no_success(workspace: Path) -> None:  # noqa: F811
    done = ddtree(workspace, "status", "--watch", "--count", "1", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["ok"] is False
