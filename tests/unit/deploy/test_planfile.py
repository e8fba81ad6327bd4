"""Given a plan in a file, exactly it is applied, or it is refused with what is different now."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.deploy import planfile
from ddtree_ops.deploy.facts import Facts, facts
from ddtree_ops.deploy.fitting import refuse_impossible
from ddtree_ops.deploy.plan import make_plan, seal
from ddtree_ops.errors import Failed, UsageError
from ddtree_ops.model import Deployment, init_workspace, load_workspace, resolve

from .test_plan import RELEASE, deployed_host, empty_host


@pytest.fixture
def ct200(tmp_path: Path) -> Deployment:
    init_workspace(tmp_path)
    return resolve(load_workspace(tmp_path), "ct200", None, "b16k4")


def seen(**changes: Any) -> Facts:
    return facts(empty_host(system={"python": "3.11.2", "hostname": "ct200"}, **changes))


def written(ct200: Deployment, folder: Path) -> Path:
    plan = make_plan(ct200, RELEASE, seen())
    path = folder / "plan.json"
    path.write_text(planfile.to_text([planfile.stored(plan, seen(), ct200)], {"who": "ann"}))
    return path


def test_a_plan_comes_back_from_its_file(ct200: Deployment, tmp_path: Path) -> None:
    (one,) = planfile.read(written(ct200, tmp_path))
    assert one.plan == make_plan(ct200, RELEASE, seen())
    planfile.require_unmoved(one, seen())


def test_what_the_file_says_is_applied_whatever_the_workspace_says_now(ct200: Deployment, tmp_path: Path) -> None:
    (one,) = planfile.read(written(ct200, tmp_path))
    profile = tmp_path / "inventories" / "profiles" / "b16k4.yaml"
    profile.write_text(profile.read_text().replace("16", "24"))
    deployment = planfile.deployment_of(load_workspace(tmp_path), one)
    assert deployment.profile == ct200.profile and deployment.profile.budget == 16
    sealed = seal(one.plan, deployment, txn="t1", author={})
    assert sealed["health"]["expect"]["speculative_ddtree_budget"] == 16
    assert sealed["generation"]["files"] == dict(make_plan(ct200, RELEASE, seen()).files)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": {"confirmed": 2, "pending": None}}, "state"),
        ({"unit": {"sha256": "1" * 64}}, "unit sha256"),
        ({"unit": {"dropins": {"/x.conf": "1" * 64}}}, "dropins"),
        ({"next_generation": 2}, "next generation: 2, planned for 1"),
    ],
)
def test_a_host_that_moved_is_refused(ct200: Deployment, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (one,) = planfile.read(written(ct200, tmp_path))
    with pytest.raises(Failed, match=said):
        planfile.require_unmoved(one, seen(**change))


def test_another_machine_under_the_same_name_is_refused(ct200: Deployment, tmp_path: Path) -> None:
    (one,) = planfile.read(written(ct200, tmp_path))
    with pytest.raises(Failed, match="calls itself b300"):
        planfile.require_unmoved(one, facts(empty_host(system={"hostname": "b300"})))


def test_a_release_that_is_nowhere_is_refused(ct200: Deployment, tmp_path: Path) -> None:
    (one,) = planfile.read(written(ct200, tmp_path))
    planfile.require_release(one, seen(), RELEASE)
    planfile.require_release(one, seen(releases_installed=[RELEASE]), "f" * 16)
    with pytest.raises(Failed, match="this checkout builds"):
        planfile.require_release(one, seen(), "f" * 16)


@pytest.mark.parametrize("damage", ["budget", "cut", "format", "none"])
def test_a_file_that_was_edited_is_refused(ct200: Deployment, tmp_path: Path, damage: str) -> None:
    path = written(ct200, tmp_path)
    text = path.read_text()
    if damage == "none":
        path.unlink()
    elif damage == "format":
        path.write_text(json.dumps({**json.loads(text), "format": 2}))
    else:
        path.write_text(
            text.replace("budget 16", "budget 17").replace("b16k4", "b16k5") if damage == "budget" else text[:900]
        )
    with pytest.raises(UsageError, match=r"plan\.json: "):
        planfile.read(path)


def test_an_inventory_that_moved_the_root_is_refused(ct200: Deployment, tmp_path: Path) -> None:
    (one,) = planfile.read(written(ct200, tmp_path))
    file = tmp_path / "inventories" / "ct200.yaml"
    file.write_text(file.read_text() + "root: /srv/ddtree\n")
    with pytest.raises(UsageError, match="/srv/ddtree"):
        planfile.deployment_of(load_workspace(tmp_path), one)


def test_a_plan_without_changes_is_kept_too(ct200: Deployment, tmp_path: Path) -> None:
    here = facts(deployed_host(ct200))
    plan = make_plan(ct200, RELEASE, here)
    path = tmp_path / "plan.json"
    path.write_text(planfile.to_text([planfile.stored(plan, here, ct200)], {}))
    (one,) = planfile.read(path)
    assert not one.plan.changes
    assert planfile.deployment_of(load_workspace(tmp_path), one).service_name == ct200.service_name


def test_a_rule_that_the_plan_was_made_without_refuses_nothing_later(tmp_path: Path) -> None:
    init_workspace(tmp_path)
    (tmp_path / "inventories/profiles/odd.yaml").write_text(
        "extends: b8k4\nextra_args: [--moe-runner-backend, deep_gemm]\n"
        "checks: {moe-deep-gemm: {severity: 'off', reason: a patched kernel}}\n"
    )
    odd = resolve(load_workspace(tmp_path), "ct200", None, "odd")
    assert [note for note in make_plan(odd, RELEASE, seen()).notes if "a patched kernel" in note]
    (one,) = planfile.read(written(odd, tmp_path))
    refuse_impossible(planfile.deployment_of(load_workspace(tmp_path), one))


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format": 1, "plans": ' + "[" * 100_000],
)
def test_a_file_that_nests_without_end_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(UsageError, match="not a plan file"):
        planfile.read(tmp_path / "p")


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="no plan is"):
        planfile.read(Path("/dev/zero"))


@pytest.mark.parametrize("meta", [{}, {"health": None}, {"health": {"port": "x"}}, {"health": {"port": 1}}])
def test_a_plan_that_lacks_its_service_is_refused(ct200: Deployment, tmp_path: Path, meta: dict[str, Any]) -> None:
    plan = dataclasses.replace(make_plan(ct200, RELEASE, seen()), meta=meta)
    path = tmp_path / "plan.json"
    path.write_text(planfile.to_text([planfile.stored(plan, seen(), ct200)], {}))
    with pytest.raises(UsageError, match="not a plan of this ddtree"):
        planfile.read(path)


def test_a_file_of_no_plans_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p").write_text(planfile.to_text([], {}))
    with pytest.raises(UsageError, match="holds no plan"):
        planfile.read(tmp_path / "p")
