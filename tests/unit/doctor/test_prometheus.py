"""Alerts and dashboard: promtool's word on them, and names that both engines really export."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from ddtree_ops.data import data_dir
from ddtree_ops.doctor.exported import METRICS, exposition
from ddtree_ops.engine.metrics import Metrics

from . import releases

RULES = data_dir("templates") / "prometheus" / "ddtree.rules.yml"
DASHBOARD = data_dir("templates") / "grafana" / "ddtree.json"
STORIES = Path(__file__).with_name("alerts.yml")
NAME = re.compile(r"\b((?:sglang|ddtree):\w+|ddtree_\w+)")


@pytest.fixture(scope="module")
def promtool() -> str:
    """The real one. With HOSTS=1, where tests/hosts/install-needs has run, it must be there."""
    found = shutil.which("promtool")
    if found is None and os.environ.get("HOSTS"):
        pytest.fail("promtool is missing: tests/hosts/install-needs takes it out of Debian's package prometheus")
    if found is None:
        pytest.skip("no promtool: the rules are not checked. HOSTS=1 make test installs it (root)")
    return found


def said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expressions() -> dict[str, str]:
    """Every expression of the dashboard by its panel's title, variables put in."""
    board = json.loads(DASHBOARD.read_text())
    found = {}
    for panel in board["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$host", ".*").replace("$service", ".*")
            assert "$" not in text
            found[f"{panel['title']} {target['refId']}"] = text
    return found


def test_the_rules_are_sound(promtool: str) -> None:
    assert "SUCCESS" in said(promtool, "check", "rules", "--lint=all", "--lint-fatal", str(RULES))


@pytest.mark.timeout(300)
def test_each_alert_fires_in_its_story_and_in_no_other(promtool: str, tmp_path: Path) -> None:
    stories = tmp_path / "alerts.yml"
    stories.write_text(STORIES.read_text().replace("%RULES%", str(RULES)))
    assert "SUCCESS" in said(promtool, "test", "rules", str(stories))


def test_every_alert_has_a_story() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    fired = {
        test["alertname"]
        for story in yaml.safe_load(STORIES.read_text())["tests"]
        for test in story["alert_rule_test"]
        if test.get("exp_alerts")
    }
    assert alerts == fired
    for rule in rules:
        if "alert" in rule:
            assert "Next: " in rule["annotations"]["description"] or "See " in rule["annotations"]["description"]


def test_the_dashboards_expressions_are_sound(promtool: str, tmp_path: Path) -> None:
    rules = [{"record": f"panel:{at}", "expr": text} for at, text in enumerate(expressions().values())]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in said(promtool, "check", "rules", str(file))


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36 and board["uid"] and board["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)
    variables = {each["name"] for each in board["templating"]["list"]}
    assert {"datasource", "host", "service"} == variables
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in board["panels"])


def used() -> set[str]:
    """Metrics that alerts and panels ask for, recorded ones left out."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    texts = [rule["expr"] for rule in rules] + list(expressions().values())
    recorded = {rule["record"] for rule in rules if "record" in rule}
    return {name for text in texts for name in NAME.findall(text)} - recorded


def test_the_reference_engine_exports_what_is_asked_for() -> None:
    metrics = Metrics("m", 7)
    metrics.stepped(1, 3)
    metrics.first_token(0.1)
    exported = set(re.findall(r"^(\w[\w:]*)", metrics.render().decode(), re.MULTILINE))
    assert {name for name in used() if name.startswith("sglang:")} <= exported


def test_sglang_exports_what_is_asked_for() -> None:
    with zipfile.ZipFile(releases.wheel("sglang")) as archive:
        text = archive.read("sglang/srt/observability/metrics_collector.py").decode()
    exported = set(re.findall(r'name="(sglang:\w+)"', text))
    asked = {re.sub(r"_bucket$", "", name) for name in used() if name.startswith("sglang:")}
    assert asked and asked <= exported


def test_what_ddtree_exports_is_what_is_asked_for() -> None:
    asked = {name for name in used() if name.startswith("ddtree_")}
    assert asked <= set(METRICS)
    text = exposition([("a", "s", dict.fromkeys(METRICS, 1.5)), ("b", "s", {"ddtree_host_reachable": 0.0})])
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) == set(METRICS)
    assert 'ddtree_host_reachable{host="b",service="s"} 0' in text
    assert 'ddtree_verdict_passed{host="b"' not in text


def test_what_is_written_is_the_text_format(promtool: str) -> None:
    text = exposition([("a", "s", {**dict.fromkeys(METRICS, 1.0), "ddtree_verdict_timestamp_seconds": 1.79e9})])
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
