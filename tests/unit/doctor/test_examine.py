"""Choosing checks, what a profile makes of them, what cannot be judged, and facts that are anything but facts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_ops.doctor.active import ACTIVE
from ddtree_ops.doctor.check import CHECKS, Case
from ddtree_ops.doctor.examine import chosen, examine
from ddtree_ops.doctor.facts import host_facts
from ddtree_ops.doctor.glance import row_of
from ddtree_ops.doctor.run import choose, with_clock
from ddtree_ops.errors import UsageError

from .recorded import deployment, healthy_case, load, sick_case, sick_reply


def test_only_and_skip_take_checks_and_groups() -> None:
    assert chosen(CHECKS, ["gpu-ecc"], []) == {"gpu-ecc"}
    assert chosen(CHECKS, ["clock"], ["clock-sync"]) == {"clock-offset"}
    assert chosen(CHECKS, [], ["GPUs"]) == {name for name, check in CHECKS.items() if check.group != "GPUs"}
    with pytest.raises(UsageError, match="did you mean 'gpu-ecc'"):
        chosen(CHECKS, ["gpu-ec"], [])


def test_an_active_check_needs_active() -> None:
    with pytest.raises(UsageError, match="runs things on the host"):
        choose(["all-reduce"], [], active=False)
    assert choose(["all-reduce"], [], active=True) == {"all-reduce"}
    assert "imports" not in choose([], [], active=False)
    assert "imports" in choose([], ["GPUs"], active=True)


@pytest.mark.parametrize(("severity", "failed"), [("error", True), ("info", False)])
def test_a_profile_raises_and_lowers_a_check_with_its_reason(tmp_path: Path, severity: str, failed: bool) -> None:
    case = sick_case(tmp_path, "power-limited")
    over = f"checks: {{gpu-power: {{severity: {severity}, reason: the rack has 20 kW}}}}\n"
    report = examine(Case(deployment(tmp_path / "o", "ct200", over), case.facts))
    (found,) = report.findings
    assert (found.severity, found.reason, report.failed) == (severity, "the rack has 20 kW", failed)


def test_a_silenced_check_is_shown_with_its_reason(tmp_path: Path) -> None:
    over = "checks: {gpu-power: {severity: 'off', reason: the rack has 20 kW}}\n"
    report = examine(Case(deployment(tmp_path / "o", "ct200", over), sick_case(tmp_path / "s", "power-limited").facts))
    assert report.findings == [] and not report.failed
    assert [(found.id, found.reason) for found in report.silenced] == [("gpu-power", "the rack has 20 kW")]
    assert "1 silenced" in report.summary()


def test_a_check_that_does_not_exist_cannot_be_silenced(tmp_path: Path) -> None:
    over = "checks: {gpu-pwr: {severity: 'off', reason: r}}\n"
    with pytest.raises(UsageError, match="did you mean 'gpu-power'"):
        examine(healthy_case(tmp_path, "ct200", over))


def test_what_cannot_be_judged_is_said_and_not_passed(tmp_path: Path) -> None:
    reply = load("healthy", "ct200")
    del reply["bus"]
    reply["kernel_log"]["readable"] = False
    reply["clock"] = "noon"
    report = examine(Case(deployment(tmp_path, "ct200"), host_facts(reply)))
    assert set(report.not_made) == {"pcie-acs", "gpu-xid", "clock-offset", "clock-sync"}
    assert "not collected" in report.not_made["pcie-acs"]
    assert "not readable for root" in report.not_made["gpu-xid"]
    assert not set(report.not_made) & set(report.passed)
    assert {found.id for found in report.findings} == {"facts-malformed"} and report.failed
    assert [found.seen for found in report.findings if "not why" in found.seen] == ["no bus, and not why"]


def test_facts_of_nothing_are_not_a_pass(tmp_path: Path) -> None:
    """Facts that were cut to their format say nothing of the host: that is an error, not 36 checks not made."""
    assert examine(Case(deployment(tmp_path, "local"), host_facts({"format": 1}))).failed


@pytest.mark.parametrize(
    ("path", "value"),
    [(("cards", "gpus", 0, "memory_total_mib"), 10**400), (("service", "restarts"), 10**400),
     (("driver", "module"), "²"), (("driver", "module"), "9" * 5000), (("driver", "module"), "\ud800"),
     (("clock", "unix"), float("nan")), (("disks", "/tmp", "free_bytes"), -(10**400))],
)  # fmt: skip
def test_numbers_and_texts_that_cannot_be_are_findings(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    reply = load("healthy", "ct200")
    node = reply
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    case = Case(deployment(tmp_path, "ct200"), host_facts(reply))
    assert examine(case).failed and path[0] in (*case.facts.malformed, "driver")
    row_of(case)


def test_facts_of_another_profile_pass_nothing(tmp_path: Path) -> None:
    """Given facts that were collected for other models, the model's checks are not made: absent is not whole."""
    report = examine(
        Case(deployment(tmp_path, "ct200", "model: /models/other\n"), host_facts(load("healthy", "ct200")))
    )
    assert "/models/other" in report.not_made["model-missing"]
    assert not {"model-missing", "model-whole", "drafter-layers", "memory-fit"} & set(report.passed)


def test_facts_of_another_service_pass_nothing_of_it(tmp_path: Path) -> None:
    reply = load("healthy", "ct200")
    reply["service"]["name"], reply["port"]["number"] = "other", 1
    report = examine(Case(deployment(tmp_path, "ct200"), host_facts(reply)))
    assert report.not_made["service-failed"] == "these facts are of the service other"
    assert report.not_made["port-taken"] == report.not_made["server-arguments"] == "these facts are of the port 1"


def test_no_check_at_all_is_refused_or_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no check to make"):
        choose(["GPUs"], ["GPUs"], active=False)
    with pytest.raises(UsageError, match="active checks"):
        choose(["active"], [], active=False)
    assert choose(["active"], [], active=True) == set(ACTIVE)
    report = examine(Case(deployment(tmp_path, "local"), host_facts(load("healthy", "ct200"))), {"gpu-ecc"})
    assert report.summary().startswith("nothing was checked")


def test_the_reference_engine_needs_no_gpu(tmp_path: Path) -> None:
    report = examine(Case(deployment(tmp_path, "local"), host_facts(sick_reply("driver-not-loaded"))))
    assert not [found for found in report.findings if found.group in ("GPUs", "topology", "driver, CUDA and fabric")]


def test_how_far_a_clock_is_off_is_what_is_certain() -> None:
    assert with_clock({"clock": {"unix": 105.0}}, 100, 110)["clock"]["behind_s"] == 0
    assert with_clock({"clock": {"unix": 70.0}}, 100, 110)["clock"]["behind_s"] == 30
    assert with_clock({"clock": {"unix": 150.0}}, 100, 110)["clock"]["behind_s"] == -40
    assert with_clock({"clock": {"unix": "x"}}, 100, 110)["clock"] == {"unix": "x"}
    assert with_clock({"clock": 7}, 100, 110) == {"clock": 7}
    assert with_clock({"clock": {"unix": 10**400}}, 100, 110) == {"clock": {"unix": 10**400}}


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything below a value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


REPLIES = {name: load("healthy", name) for name in ("ct200", "b300")}


@given(data=st.data(), name=st.sampled_from(["ct200", "b300"]))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_facts_whatever_crash_it(tmp_path: Path, data: st.DataObject, name: str) -> None:
    """Given a healthy host's facts with a few of them replaced by anything, there is a report."""
    reply = copy.deepcopy(REPLIES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(reply)))
        node = reply
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = data.draw(ANY)
    where = tmp_path / name
    made = deployment(where, name) if not where.exists() else _again(where, name)
    report = examine(Case(made, host_facts(reply)))
    assert len({*report.passed, *report.not_made, *(f.id for f in report.findings)}) == len(CHECKS)


def _again(where: Path, name: str) -> Any:
    from ddtree_ops.model import load_workspace, resolve

    return resolve(load_workspace(where), name, None, "over")
