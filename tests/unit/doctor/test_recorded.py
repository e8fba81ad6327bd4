"""Recorded hosts: healthy ones have no finding, each sick one has exactly its own."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ddtree_ops.doctor.active import ACTIVE
from ddtree_ops.doctor.check import CHECKS, GROUPS, Case
from ddtree_ops.doctor.examine import examine
from ddtree_ops.model.types import Group

from .recorded import HEALTHY, SICK, healthy_case, load, sick_case


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_host_has_no_finding(tmp_path: Path, name: str) -> None:
    report = examine(healthy_case(tmp_path, name))
    assert report.findings == []
    assert report.not_made == {}
    assert len(report.passed) == len(CHECKS)
    assert not report.failed


@pytest.mark.parametrize("name", SICK)
def test_a_sick_host_has_exactly_its_finding(tmp_path: Path, name: str) -> None:
    sick = load("sick", name)
    report = examine(sick_case(tmp_path, name))
    assert [finding.id for finding in report.findings] == [sick["finding"]], report.findings
    (found,) = report.findings
    assert found.severity in ("error", "warning")
    assert report.failed is (found.severity == "error")
    # What an operator at night needs: seen, expected, and something to do.
    assert found.seen and found.expected and found.do and found.reference


def test_every_check_can_fail() -> None:
    assert {load("sick", name)["finding"] for name in SICK} == set(CHECKS)


def test_every_file_says_where_it_is_from() -> None:
    for kind, names in (("healthy", HEALTHY), ("sick", SICK)):
        for name in names:
            assert re.match(r"made up|partly measured: |measured: ", load(kind, name)["label"])
    assert len(SICK) >= 25


def test_checks_are_named_once_and_grouped() -> None:
    assert not set(CHECKS) & set(ACTIVE)
    assert {check.group for check in CHECKS.values()} | {"active"} == set(GROUPS)


@pytest.mark.parametrize(("rank", "silent"), [(0, True), (1, False)])
def test_of_several_nodes_only_rank_0_has_to_answer(tmp_path: Path, rank: int, silent: bool) -> None:
    case = sick_case(tmp_path, "server-silent")
    group = Group(rank=rank, addresses=["10.0.0.1", "10.0.0.2"], port=20000)
    profile = msgspec.structs.replace(case.profile, nodes=group)
    here = msgspec.structs.replace(case.deployment, profile=profile)
    assert ("service-silent" in {found.id for found in examine(Case(here, case.facts)).findings}) is silent
