"""Given facts of a host, the plan says what would change and why, and is empty only when nothing would."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest

from ddtree_ops.deploy.drift import find_drift, unproven
from ddtree_ops.deploy.facts import facts
from ddtree_ops.deploy.plan import Known, Transfer, make_plan, seal, sha256
from ddtree_ops.deploy.run import require_free_port, require_leave
from ddtree_ops.errors import Failed
from ddtree_ops.model import Deployment, load_workspace, resolve
from ddtree_ops.units import render

RELEASE = "0123456789abcdef"
MODELS = {"/models/Kimi-K2.6": {"config_sha256": "aa"}, "/models/Kimi-K2.6-DFlash": {"config_sha256": "bb"}}


def with_profile(deployment: Deployment, name: str) -> Deployment:
    return resolve(load_workspace(deployment.workspace_path), deployment.host.name, None, name)


def empty_host(**changes: Any) -> dict[str, Any]:
    """A probe's reply from a host where nothing was ever deployed."""
    return {
        "system": {"python": "3.11.2"},
        "next_generation": 1,
        "models": {path: {"present": True, "identity": identity} for path, identity in MODELS.items()},
        **changes,
    }


def deployed_host(deployment: Deployment, **changes: Any) -> dict[str, Any]:
    """A probe's reply from a host where generation 3 is what ``deployment`` renders, proven and running."""
    files = render(deployment, RELEASE, 3).files
    plan = make_plan(deployment, RELEASE, facts(empty_host(next_generation=3)))
    return {
        **empty_host(),
        "state": {"confirmed": 3, "pending": None},
        "next_generation": 4,
        "releases_installed": [RELEASE],
        "generation": {"n": 3, "meta": dict(plan.meta), "files": {name: sha256(text) for name, text in files.items()}},
        "unit": {
            "path": "/etc/systemd/system/x.service",
            "sha256": sha256(files["unit"]),
            "text": files["unit"],
            "enabled": "enabled",
        },
        "active": {"state": "active", "pid": 7},
        "verdict": {"kind": "EXACT", "passed": True, "binds": {"generation": 3, "python": "3.11.2"}},
        "server_info": dict(plan.meta["health"]["expect"]),
        **changes,
    }


def test_first_deploy_creates_generation_one(ct200: Deployment) -> None:
    plan = make_plan(ct200, RELEASE, facts(empty_host()))
    assert (plan.action, plan.from_, plan.to) == ("deploy", None, 1)
    assert plan.reasons == ("nothing is deployed yet",)
    assert plan.meta["models"] == MODELS
    assert f"/opt/ddtree/releases/{RELEASE}/venv/bin/python" in plan.diff


def test_what_runs_and_is_proven_needs_nothing(ct200: Deployment) -> None:
    plan = make_plan(ct200, RELEASE, facts(deployed_host(ct200)))
    assert not plan.changes
    assert (plan.reasons, plan.drift, plan.diff, plan.to) == ((), (), "", 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"active": {"state": "failed"}}, "the service is failed"),
        ({"verdict": None}, "UNPROVEN: generation 3 has no verdict"),
        ({"verdict": {"kind": "FAIL", "passed": False}}, "UNPROVEN: the last verdict is FAIL"),
        (
            {"verdict": {"kind": "EXACT", "passed": True, "binds": {"generation": 2, "python": "3.11.2"}}},
            "UNPROVEN: the last verdict is of generation 2",
        ),
        (
            {"verdict": {"kind": "EXACT", "passed": True, "binds": {"generation": 3, "python": "3.11.1"}}},
            "UNPROVEN: the interpreter was 3.11.1 when it was proven, it is 3.11.2 now",
        ),
    ],
)
def test_doubt_is_a_change(ct200: Deployment, change: dict[str, Any], reason: str) -> None:
    plan = make_plan(ct200, RELEASE, facts(deployed_host(ct200, **change)))
    assert plan.changes and plan.reasons == (reason,)


def test_another_profile_and_release_are_named(ct200: Deployment) -> None:
    plan = make_plan(with_profile(ct200, "b16k4"), "f" * 16, facts(deployed_host(ct200)))
    assert f"release {RELEASE} -> {'f' * 16}" in plan.reasons
    assert "budget 8 -> 16" in plan.reasons
    assert not any(reason.startswith("topk") for reason in plan.reasons)
    assert plan.to == 4 and plan.from_ == 3


def test_a_changed_port_changes_the_files(ct200: Deployment) -> None:
    moved = msgspec.structs.replace(ct200, service=msgspec.structs.replace(ct200.service, port=30999))
    plan = make_plan(moved, RELEASE, facts(deployed_host(ct200)))
    assert plan.reasons == ("the rendered files differ (inventory or templates changed)",)
    assert "30999" in plan.diff


UNIT = "/etc/systemd/system/x.service"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"unit": {"path": UNIT, "sha256": "0" * 64, "text": "edited", "enabled": "enabled"}},
            f"{UNIT} was edited on the host",
        ),
        ({"unit": {"path": UNIT, "sha256": None}}, f"{UNIT} is gone"),
        (
            {"server_info": {"speculative_ddtree_budget": 4}},
            "the running server shows speculative_ddtree_budget = 4, deployed was 8",
        ),
        ({"models": {}}, None),
        (
            {"models": {path: {"present": False} for path in MODELS}},
            "the model at /models/Kimi-K2.6 is gone",
        ),
        (
            {"models": {path: {"present": True, "identity": {"config_sha256": "cc"}} for path in MODELS}},
            "the model at /models/Kimi-K2.6 is no longer the one that was proven",
        ),
    ],
)
def test_drift_is_seen(ct200: Deployment, change: dict[str, Any], line: str | None) -> None:
    found = find_drift(facts(deployed_host(ct200, **change)), "systemd")
    if line is None:  # not probed is not gone
        assert found == []
    else:
        assert line in found


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("dropins", {f"{UNIT}.d/own.conf": "1" * 64}, f"drop-in {UNIT}.d/own.conf was added by somebody else"),
        ("masked", True, "/etc/systemd/system/x.service is masked"),
        ("enabled", "disabled", "the service is disabled: it would not start at boot"),
    ],
)
def test_drift_of_the_unit_is_seen(ct200: Deployment, key: str, value: Any, line: str) -> None:
    reply = deployed_host(ct200)
    reply["unit"] = {**reply["unit"], key: value}
    seen = facts(reply)
    plan = make_plan(ct200, RELEASE, seen)
    assert line in plan.drift and plan.changes
    allowed = make_plan(ct200, RELEASE, seen, overwrite=True)
    assert allowed.drift == () and f"drift: {line}" in allowed.reasons


def test_a_foreign_unit_is_drift_until_adopted(ct200: Deployment) -> None:
    seen = facts(empty_host(unit={"path": UNIT, "sha256": "1" * 64, "text": "[Service]\n"}))
    assert make_plan(ct200, RELEASE, seen).drift == (f"{UNIT} exists and ddtree did not make it",)
    adopted = make_plan(ct200, RELEASE, seen, adopt=True)
    assert adopted.drift == () and adopted.expect["unit_sha256"] == "1" * 64


def test_the_sealed_plan_names_what_it_expects(ct200: Deployment) -> None:
    seen = facts(deployed_host(ct200))
    plan = make_plan(with_profile(ct200, "b16k4"), RELEASE, seen)
    sealed = seal(plan, ct200, txn="t1", author={"who": "ann"})
    assert sealed["expect"] == {
        "state": {"confirmed": 3, "pending": None},
        "unit_sha256": seen.unit.sha256,
        "dropins": {},
        "next_generation": 4,
    }
    assert sealed["health"]["expect"]["speculative_ddtree_budget"] == 16
    assert sealed["generation"]["files"]["unit"] == plan.files["unit"]
    assert json.loads(json.dumps(sealed)) == sealed


def test_unproven_needs_a_generation(ct200: Deployment) -> None:
    assert unproven(facts(empty_host())) == "nothing was ever proven here"
    assert unproven(facts(deployed_host(ct200))) is None


BOUND = {"generation": 3, "python": "3.11.2"}


@pytest.mark.parametrize(
    ("verified", "why"),
    [
        ({"kind": "EXACT", "passed": True, "binds": BOUND}, None),
        ({"kind": "FAIL", "passed": False, "binds": BOUND}, "the last verdict is FAIL"),
        ({"kind": "INCONCLUSIVE", "passed": False, "binds": BOUND}, None),
        ({"kind": "EXACT", "passed": True, "binds": {"generation": 2, "python": "3.11.2"}}, "of generation 2"),
        ({"kind": "EXACT", "passed": True, "binds": {**BOUND, "driver": "580.1"}}, "the driver was 580.1"),
    ],
)
def test_what_verify_exactness_decided_last_is_what_counts(
    ct200: Deployment, verified: dict[str, Any], why: str | None
) -> None:
    reply = deployed_host(ct200, verified=verified)
    reply["system"] = {**reply["system"], "driver": "590.2"}
    found = unproven(facts(reply))
    assert found is None if why is None else why in (found or "")


def test_a_pass_by_verify_exactness_proves_again_under_a_new_interpreter(ct200: Deployment) -> None:
    old = {"kind": "EXACT", "passed": True, "binds": {"generation": 3, "python": "3.10.1"}}
    assert "the interpreter was 3.10.1" in (unproven(facts(deployed_host(ct200, verdict=old))) or "")
    new = {"kind": "EXACT", "passed": True, "binds": BOUND}
    assert unproven(facts(deployed_host(ct200, verdict=old, verified=new))) is None


@pytest.mark.parametrize("reply", [{}, {"system": {}, "state": 3}, {"system": {}, "active": {"state": 1}}])
def test_a_host_that_answers_nonsense_is_refused(reply: dict[str, Any]) -> None:
    with pytest.raises(Failed, match="unknown form"):
        facts(reply)


def test_while_a_deploy_has_not_ended_nothing_counts_as_proven(ct200: Deployment) -> None:
    """The host serves the generation that is tried: neither drift of the old one, nor covered by its verdict."""
    reply = deployed_host(ct200)
    reply["state"] = {"confirmed": 3, "pending": {"txn": "t-9", "from": 3, "to": 4}}
    reply["unit"]["sha256"] = "1" * 64
    seen = facts(reply)
    assert find_drift(seen, "systemd") == []
    assert "t-9" in (unproven(seen) or "") and "4" in (unproven(seen) or "")


def test_an_adopted_generation_may_have_any_number(ct200: Deployment) -> None:
    reply = deployed_host(ct200)
    reply["generation"] = {"n": 3, "meta": {"adopted": {"kind": "file"}}, "files": {}}
    reply["verdict"] = {"kind": "UNPROVEN", "passed": True}
    seen = facts(reply)
    assert find_drift(seen, "systemd") == []
    assert "hand-made" in (unproven(seen) or "")
    assert any("hand-made unit runs (generation 3)" in reason for reason in make_plan(ct200, RELEASE, seen).reasons)


def test_overwriting_what_nobody_keeps_is_said_first(ct200: Deployment) -> None:
    seen = facts(empty_host(unit={"path": "/etc/systemd/system/x.service", "sha256": "1" * 64}))
    assert any("--adopt would keep it" in note for note in make_plan(ct200, RELEASE, seen, overwrite=True).notes)
    assert not any("--adopt" in note for note in make_plan(ct200, RELEASE, seen, adopt=True).notes)


@pytest.mark.parametrize(
    ("owner", "refused"), [(None, False), ((7, True), False), ((7, False), True), ((None, False), True)]
)
def test_a_port_that_another_holds_is_refused_before_anything_is_sent(
    ct200: Deployment, owner: tuple[int | None, bool] | None, refused: bool
) -> None:
    held = None if owner is None else {"pid": owner[0], "command": "nginx", "ours": owner[1]}
    seen = facts(empty_host(port_owner=held))
    with pytest.raises(Failed, match="30000 is taken by") if refused else contextlib.nullcontext():
        require_free_port("ct200", 30000, seen)


@pytest.mark.parametrize(("kept", "tried"), [(0, 4), (4, 5)])
def test_what_was_edited_is_adopted_beside_the_generations(ct200: Deployment, kept: int, tried: int) -> None:
    """The host numbers an adopted unit 0, or the next free number; the plan must count as the host does."""
    reply = deployed_host(ct200)
    reply["adopt_generation"] = kept
    unedited = make_plan(with_profile(ct200, "b16k4"), RELEASE, facts(reply), adopt=True)
    assert (unedited.adopts, unedited.from_, unedited.to) == (False, 3, 4)
    reply["unit"]["sha256"] = "1" * 64
    plan = make_plan(ct200, RELEASE, facts(reply), adopt=True)
    assert (plan.adopts, plan.from_, plan.to) == (True, kept, tried)


MINE = {"who": "ann", "workspace_commit": "b" * 40}


@pytest.mark.parametrize(("ancestor", "refused"), [(True, False), (None, False), (False, True)])
def test_what_came_from_commits_that_are_not_here_needs_overwrite(
    ct200: Deployment, ancestor: bool | None, refused: bool
) -> None:
    """Another operator deployed from a branch of his own: a deploy from here would undo it unseen."""
    reply = deployed_host(ct200)
    reply["generation"]["meta"].update(workspace_commit="a" * 40, who="bob")
    known = Known(author=MINE, ancestor=ancestor)
    plan = make_plan(with_profile(ct200, "b16k4"), RELEASE, facts(reply), known=known)
    assert (plan.behind is not None) == refused
    if refused:
        assert "a" * 12 in (plan.behind or "") and "bob" in (plan.behind or "") and "b" * 12 in (plan.behind or "")
        with pytest.raises(Failed, match="not in the history of yours"):
            require_leave(plan, facts(reply))
    require_leave(
        make_plan(with_profile(ct200, "b16k4"), RELEASE, facts(reply), known=known, overwrite=True), facts(reply)
    )


def test_nothing_to_change_is_nothing_to_refuse(ct200: Deployment) -> None:
    plan = make_plan(ct200, RELEASE, facts(deployed_host(ct200)), known=Known(author=MINE, ancestor=False))
    assert not plan.changes and plan.behind is None


@pytest.mark.parametrize(
    ("state", "last", "restarts", "downtime"),
    [("active", 12.5, True, 12.5), ("active", None, True, None), ("inactive", 12.5, False, 0.0)],
)
def test_the_plan_says_what_restarts_and_for_how_long(
    ct200: Deployment, state: str, last: float | None, restarts: bool, downtime: float | None
) -> None:
    seen = facts(deployed_host(ct200, active={"state": state, "pid": 7}, last_downtime_s=last))
    plan = make_plan(with_profile(ct200, "b16k4"), RELEASE, seen)
    assert (plan.restarts is not None) == restarts and plan.downtime_s == downtime
    profile = ct200.profile
    assert plan.downtime_limit_s == (profile.stop_timeout_s + profile.load_timeout_s if restarts else 0)


@pytest.mark.parametrize(
    ("cannot", "guard", "said"),
    [
        (None, False, "it binds 127.0.0.1"),
        ("", True, "IPAddressDeny=, tried on the host"),
        ("no such luck", False, "serves unproven"),
    ],
)
def test_the_plan_says_who_reaches_what_is_unproven(
    ct200: Deployment, cannot: str | None, guard: bool, said: str
) -> None:
    plan = make_plan(ct200, RELEASE, facts(empty_host()), known=Known(cannot_guard=cannot))
    assert plan.guard is guard and any(said in note for note in plan.notes)
    assert seal(plan, ct200, txn="t1", author={})["guard"] is guard


def test_the_diff_shows_the_environment_and_the_drop_ins_that_go(ct200: Deployment) -> None:
    reply = deployed_host(ct200)
    reply["unit"] |= {
        "dropins": {f"{UNIT}.d/own.conf": "1" * 64},
        "dropin_texts": {f"{UNIT}.d/own.conf": "[Service]\n"},
    }
    known = Known(old_env='LANG="C"\n', transfer=Transfer(3, 4096))
    plan = make_plan(with_profile(ct200, "b16k4"), RELEASE, facts(reply), known=known, overwrite=True)
    assert '-LANG="C"' in plan.diff and "-[Service]" in plan.diff and "b16k4" in plan.diff
    told = plan.as_json()
    assert told["transfer"] == {"files": 3, "bytes": 4096} and "files" not in told and told["from"] == 3


@pytest.mark.parametrize(
    ("unit", "drift", "line"),
    [
        ({"kind": "link", "sha256": None}, ["the unit was edited"], f"{UNIT} was replaced by a link"),
        ({}, ["its links are ['x'], not ['y']"], "its links are ['x'], not ['y']"),
        ({}, ["env of generation 3 was edited or is gone"], "env of generation 3 was edited or is gone"),
        ({}, ["the guard of an earlier deploy is still there"], "the guard of an earlier deploy is still there"),
    ],
)
def test_drift_that_the_host_itself_tells_is_shown(
    ct200: Deployment, unit: dict[str, Any], drift: list[str], line: str
) -> None:
    reply = deployed_host(ct200, drift=drift)
    reply["unit"] = {**reply["unit"], "path": UNIT, **unit}
    assert find_drift(facts(reply), "systemd") == [line]


def test_an_adopted_unit_that_was_edited_is_drift(ct200: Deployment) -> None:
    reply = deployed_host(ct200, drift=["the unit was edited"])
    reply["generation"] = {"n": 3, "meta": {"adopted": {"kind": "file"}}, "files": {}}
    assert find_drift(facts(reply), "systemd") == ["the unit was edited"]


def test_a_unit_of_the_distribution_is_drift(ct200: Deployment) -> None:
    unit = {"path": UNIT, "fragment": "/usr/lib/systemd/system/x.service"}
    seen = facts(empty_host(drift=["a unit of this name exists and is not ours"], unit=unit))
    assert find_drift(seen, "systemd") == ["/usr/lib/systemd/system/x.service exists and ddtree did not make it"]


def test_a_base_that_no_gpu_has_proven_is_named_in_every_plan(ct200: Deployment) -> None:
    profile = msgspec.structs.replace(ct200.profile, release_base="sglang-0.5.23")
    newest = msgspec.structs.replace(ct200, profile=profile)
    said = "release_base sglang-0.5.23: No GPU has run it"
    assert any(note.startswith(said) for note in make_plan(newest, RELEASE, facts(empty_host())).notes)
    runs = make_plan(newest, RELEASE, facts(deployed_host(newest)))
    assert not runs.changes and any(note.startswith(said) for note in runs.notes)
    assert not any("No GPU" in note for note in make_plan(ct200, RELEASE, facts(empty_host())).notes)


def test_a_unit_whose_generation_is_gone_is_not_taken_for_ours(ct200: Deployment) -> None:
    reply = deployed_host(ct200, generation=None)
    assert find_drift(facts(reply), "systemd") == ["/etc/systemd/system/x.service exists and ddtree did not make it"]
