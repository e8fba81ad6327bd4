"""Given command lines of sweep, report and tune, what is wrong is refused before a host is asked, in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.cli.livetable import LiveTable
from ddtree_ops.cli.screen import Screen
from ddtree_ops.cli.snapshot import sweep_files
from ddtree_ops.cli.sweep import line, minutes
from ddtree_ops.deploy.evidence import evidence_of
from ddtree_ops.errors import UsageError
from ddtree_ops.model import load_workspace, resolve
from ddtree_ops.model.init import init_workspace
from ddtree_ops.sweep.grid import AR, Cell, Shape, Start
from ddtree_ops.sweep.profiles import deployment_of, rules_of, shape_of
from ddtree_ops.sweep.records import JOURNAL, cells, opened, sha256_of
from ddtree_ops.sweep.runner import Progress
from tests.documented import documented

from ..sweep.made import B8K4, load, made_run

STORED = Path(__file__).parents[1] / "report" / "stored"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    init_workspace(tmp_path)
    return tmp_path


def ddtree(folder: Path, *words: str) -> tuple[int, str, str]:
    argv = [sys.executable, "-m", "ddtree_ops.cli", *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if "--json" in words:
        documented(words, done.stdout)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["sweep", "--pair", "8-4"], "BUDGET/TOPK"),
        (["sweep", "--budget", "8"], "go together"),
        (["sweep", "-c", "0,8"], "whole numbers above 0"),
        (["sweep", "--rate", "fast"], "requests a second"),
        (["sweep", "--prompts", "nowhere"], "no such set"),
        (["sweep", "--host", "all"], "one host at a time"),
        (["sweep", "--pair", "8/4"], "say --yes"),
        (["report", "nowhere"], "no run of a sweep"),
        (["tune", "--objective", "speed"], "latency, throughput, or C=N"),
        (["tune", "--budget", "8", "--topk", "4"], "say --yes"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(fleet: Path, words: list[str], why: str) -> None:
    code, out, err = ddtree(fleet, *words)
    assert code == 2 and why in err and "Traceback" not in err and out == ""


def test_a_report_is_written_beside_its_run_and_told_as_json(fleet: Path) -> None:
    run = fleet / "sweeps" / "x"
    run.mkdir(parents=True)
    (run / JOURNAL).write_bytes((STORED / JOURNAL).read_bytes())
    code, out, _ = ddtree(fleet, "report", "sweeps/x", "--readme", "--json")
    told = json.loads(out)
    assert code == 0 and told["readme"] and told["sha256"] == sha256_of(run / JOURNAL)
    assert (run / "report" / "report.html").is_file()
    assert "[sweeps/x/report/report.md](sweeps/x/report/report.md)" in (fleet / "README.md").read_text()


def test_a_readmes_block_is_kept_up_to_date_by_its_own_report_alone(fleet: Path, tmp_path: Path) -> None:
    """Once any report written from within a workspace took the place of the one that its README shows."""
    for name in "xy":
        (fleet / "sweeps" / name).mkdir(parents=True)
        (fleet / "sweeps" / name / JOURNAL).write_bytes((STORED / JOURNAL).read_bytes())
    assert ddtree(fleet, "report", "sweeps/x", "--readme")[0] == 0
    readme = fleet / "README.md"
    shown = readme.read_text()
    for words in (["sweeps/y"], ["sweeps/x", "-o", str(tmp_path / "elsewhere")]):
        code, out, _ = ddtree(fleet, "report", *words, "--json")
        assert (code, json.loads(out)["readme"], readme.read_text()) == (0, False, shown)
    readme.write_text(shown.replace("tokens/s", "apples"))
    assert ddtree(fleet, "report", "sweeps/x")[0] == 0
    assert readme.read_text() == shown


def test_a_shape_takes_the_profiles_place_and_the_hosts_rules_hold(fleet: Path) -> None:
    workspace = load_workspace(fleet)
    for shape in (AR, Shape("dflash"), B8K4):
        made = deployment_of(workspace, "b300", None, shape, 64)
        assert shape_of(made) == shape and made.profile.max_running_requests == 128
        assert made.profile.model == "/models/Kimi-K2.6" and made.profile.name == f"sweep-{shape.name}"
    eager = deployment_of(workspace, "b300", None, Shape("ddtree", 16, 4), 64)
    assert not eager.profile.cuda_graph and any("b300 rules[0]" in rule for rule in rules_of(eager))
    assert deployment_of(workspace, "b300", None, AR, 256).profile.max_running_requests == 256


def tuned(fleet: Path, **evidence: str) -> str:
    """What a plan says of the evidence of a profile for b8k4's shape."""
    lines = "".join(f'  {key}: "{value}"\n' for key, value in evidence.items())
    text = f"algorithm: ddtree\nbudget: 8\ntopk: 4\nevidence:\n{lines}"
    (fleet / "inventories" / "profiles" / "tuned.yaml").write_text(text)
    return evidence_of(resolve(load_workspace(fleet), "ct200", None, "tuned"))


def test_a_plan_says_on_which_evidence_a_profile_stands(fleet: Path) -> None:
    records = made_run({(AR, 1): 98.0, (B8K4, 1): 150.0})
    with opened(fleet / "sweeps" / "x") as journal:
        for record in records:
            journal.append(record)
    where, digest = f"sweeps/x/{JOURNAL}", sha256_of(fleet / "sweeps" / "x" / JOURNAL)
    assert evidence_of(resolve(load_workspace(fleet), "ct200")) == "evidence: none, no sweep chose b8k4 (ddtree tune)"
    good = f"evidence: {where}, sha256 {digest[:12]}"
    assert tuned(fleet, records=where, sha256=digest) == good
    assert "has changed since" in tuned(fleet, records=where, sha256="0" * 64)
    assert "cannot be read here" in tuned(fleet, records="sweeps/gone", sha256=digest)
    (fleet / "inventories" / "profiles" / "wider.yaml").write_text("extends: tuned\nbudget: 16\n")
    tuned(fleet, records=where, sha256=digest)
    wider = resolve(load_workspace(fleet), "ct200", None, "wider")
    assert wider.profile.evidence is None and wider.profile.budget == 16
    with opened(fleet / "sweeps" / "y") as journal:
        for record in made_run({(AR, 1): 98.0}):
            journal.append(record)
    other = f"sweeps/y/{JOURNAL}"
    told = tuned(fleet, records=other, sha256=sha256_of(fleet / other))
    assert "holds no exact cell of this profile's shape" in told


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        ({"records": "../x", "sha256": "0" * 64}, "inside the workspace"),
        ({"records": "x", "sha256": "12"}, "64 hexadecimal digits"),
        ({"records": "x"}, "sha256 is missing"),
        ({"records": "x", "sha256": "0" * 64, "by": "me"}, "unknown key"),
    ],
)
def test_evidence_that_is_none_is_refused(fleet: Path, evidence: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        tuned(fleet, **evidence)


def test_a_snapshot_takes_the_sweep_of_its_own_service_along() -> None:
    files, headline = sweep_files(STORED, "local", "tiny")
    assert files[JOURNAL] == (STORED / JOURNAL).read_text() and "report.md" in files
    assert headline.startswith("Fastest measured: C=1 b8k4")
    with pytest.raises(UsageError, match="not of k26 on ct200"):
        sweep_files(STORED, "ct200", "k26")


@pytest.mark.parametrize("drawn", [True, False])
def test_what_runs_is_shown_as_a_table_on_a_terminal_and_as_lines_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drawn: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1") if drawn else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    with opened(tmp_path) as journal:
        table = LiveTable(Screen(), 0, journal, line, minutes)
        with table as live:
            for record in made_run({(AR, 1): 98.0, (B8K4, 1): 150.0}, starts=1):
                journal.append(record)
            done = cells(journal.records)
            starts = [Start(cell.shape, 1, (cell,)) for cell in done]
            live.watch(Progress([*starts, Start(B8K4, 2, (Cell(B8K4, load(1), 2),))], done, None, 600.0))
            live.step("starting \x1b[2J")
            live.progress("b8k4#2 C=1: repeat 1 of 3", 3, 32)
            live.warn("look here")
    told = capsys.readouterr().err
    assert "ar#1 C=1 coding x512 3x32" in told and "tokens/s, accept length 4.00" in told
    assert "2 of 3" in told and "about 10 min left" in told and "look here" in told
    assert "\x1b[2J" not in told
    assert ("repeat 1 of 3 3/32" in told) == drawn
