"""The nodes of a service are planned as one: all change or none, and ranks of two deploys never meet; mixed is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.deploy import nodes
from ddtree_ops.deploy.aftermath import Attended, conclude
from ddtree_ops.deploy.facts import Facts, facts
from ddtree_ops.deploy.plan import Known, Plan, make_plan, profile_changes
from ddtree_ops.deploy.run import require_leave
from ddtree_ops.deploy.session import Options, Session
from ddtree_ops.errors import DdtreeError, Failed, Interrupted, NeedsHand, RolledBack, Unreachable
from ddtree_ops.model import Deployment, load_workspace, resolve
from ddtree_ops.model.nodes import at_port
from ddtree_ops.units import render
from tests.unit.model.test_nodes import BARE, NODES, TWO
from tests.unit.model.workspaces import HOST, make

from .test_attend import Quiet
from .test_plan import RELEASE, deployed_host, empty_host


class Scripted(Session):
    """A node whose host's answers are given: what a probe finds, whether it can keep others off."""

    def __init__(self, deployment: Deployment, found: dict[str, Any], guards: str = "", others: Any = ()) -> None:
        self.deployment, self.others = deployment, others
        self.found, self.guards, self.looks = found, guards, 0
        self.agent = self  # type: ignore[assignment]

    def call(self, verb: str, **_: Any) -> dict[str, Any]:
        assert verb == "guard"
        return {"why": self.guards}

    def look(self) -> Facts:
        self.looks += 1
        return facts(self.found)

    def plan(self, options: Options, seen: Facts | None = None, why: str = "") -> tuple[Plan, Facts]:
        assert seen is not None
        allowed = {"adopt": options.adopt, "overwrite": options.overwrite}
        return make_plan(self.deployment, RELEASE, seen, known=Known(why=why), **allowed), seen


@pytest.fixture
def two(tmp_path: Path) -> Deployment:
    host = HOST.replace("profile: b8k4", "profile: two") + NODES
    files = {"i.yaml": BARE.replace("192.0.2.7", "192.0.2.8"), "profiles/two.yaml": TWO}
    return resolve(load_workspace(make(tmp_path, files, host=host)), "h")


def deployed(deployment: Deployment, txn: str = "txn-1", port: int = 20000) -> dict[str, Any]:
    """What a probe finds at a node that stands on that deploy."""
    found = deployed_host(at_port(deployment, port))
    found["generation"]["meta"]["txn"] = txn
    return found


def session(two: Deployment, first: dict[str, Any], second: dict[str, Any], guards: str = "") -> Scripted:
    return Scripted(two, first, others=[Scripted(two.others[0], second, guards)])


def meeting(it: Session) -> set[int]:
    return {one.deployment.profile.nodes.port for one in it.every if one.deployment.profile.nodes}


def test_what_runs_on_all_and_is_proven_needs_nothing_and_one_look_each(two: Deployment) -> None:
    it = session(two, deployed(two, port=20010), deployed(two.others[0], port=20010))
    plan, seen = nodes.planned(it, Options())
    assert [one.changes for one in plan.every] == [False, False] and len(seen.every) == 2
    assert it.looks == it.others[0].looks == 1  # type: ignore[attr-defined]
    assert meeting(it) == {20010}


def test_the_first_deploy_is_one_plan_for_all(two: Deployment) -> None:
    plan, _ = nodes.planned(session(two, empty_host(), empty_host()), Options())
    assert [(one.host, one.to, one.reasons) for one in plan.every] == [
        ("h", 1, ("nothing is deployed yet",)),
        ("i", 1, ("nothing is deployed yet",)),
    ]
    assert [one.meta["nodes"]["rank"] for one in plan.every] == [0, 1]
    assert plan.as_json()["others"][0]["host"] == "i"


def test_a_change_of_one_node_changes_all_and_they_meet_elsewhere(two: Deployment) -> None:
    failed = {**deployed(two.others[0]), "active": {"state": "failed"}}
    it = session(two, deployed(two), failed)
    plan, _ = nodes.planned(it, Options())
    assert plan.reasons == ("the ranks of a service start together",)
    assert plan.others[0].reasons == ("the service is failed",)
    assert meeting(it) == {20010}
    assert all('"--dist-init-addr" "10.0.0.1:20010"' in one.files["unit"] for one in plan.every)


def test_what_the_operator_allowed_holds_at_every_node(two: Deployment) -> None:
    """An edit at the second node is drift there; to overwrite it was said once, for the service."""
    edited = deployed(two.others[0])
    edited["unit"] |= {"sha256": "0" * 64}
    for allowed in (Options(), Options(overwrite=True)):
        plan, _ = nodes.planned(session(two, deployed(two), edited), allowed)
        assert [one.overwrite for one in plan.every] == [allowed.overwrite] * 2
        assert [bool(one.drift) for one in plan.every] == [False, not allowed.overwrite]


def test_mixed_nodes_are_brought_together_at_a_port_that_neither_uses(two: Deployment) -> None:
    it = session(two, deployed(two, "txn-1"), deployed(two.others[0], "txn-2", 20010))
    plan, seen = nodes.planned(it, Options())
    told = "the nodes are mixed: h stands on generation 3 (txn-1), i stands on generation 3 (txn-2)"
    assert [one.reasons for one in plan.every] == [(told,), (told,)]
    assert meeting(it) == {20020}
    assert nodes.mixed(["h", "i"], seen.every) == told


def test_a_node_that_has_nothing_is_mixed_too(two: Deployment) -> None:
    told = nodes.mixed(["h", "i"], [facts(deployed(two)), facts(empty_host())])
    assert told == "the nodes are mixed: h stands on generation 3 (txn-1), i on nothing"
    assert nodes.mixed(["h", "i"], [facts(empty_host()), facts(empty_host())]) is None


def test_where_a_host_cannot_keep_others_off_its_workers_it_is_refused_and_shown(two: Deployment) -> None:
    plan, seen = nodes.planned(session(two, empty_host(), empty_host(), guards="no BPF here"), Options())
    assert plan.exposed == "" and "unpickle what comes: no BPF here" in plan.others[0].notes[-1]
    with pytest.raises(Failed, match="i: others than its nodes reach the ports of its workers"):
        require_leave(plan.others[0], seen.others[0])


def test_another_meeting_port_is_no_change_of_the_profile() -> None:
    old, new = ({"nodes": {"rank": 0, "addresses": ["10.0.0.1"], "port": port}} for port in (20000, 20010))
    assert profile_changes(old, new) == []
    assert profile_changes({"nodes": None}, new) != []


def test_every_sealed_plan_has_the_transactions_name_and_waits_for_the_others(two: Deployment) -> None:
    plan, _ = nodes.planned(session(two, empty_host(), empty_host()), Options())
    documents = nodes.sealed(plan, two.every, txn="txn-5", author={})
    assert [(one["txn"], one["together"], one["target"]) for one in documents] == [("txn-5", True, 1)] * 2
    alone = nodes.sealed(dataclasses.replace(plan, others=()), [two], txn="txn-5", author={})
    assert "together" not in alone[0]


CONFIRMED = {"step": "end", "event": "confirmed", "generation": 4}
RECOVERED = {"step": "end", "event": "recovered", "generation": 3, "reason": "i: start: it died", "proven": False}
UNCHANGED = {"step": "end", "event": "unchanged", "generation": 3, "reason": "i: moved"}
STUCK = {"step": "end", "event": "stuck", "reason": "the disk is gone", "commands": ["mend it"]}
UNKNOWN = {"event": "unknown"}


@pytest.mark.parametrize(
    ("ends", "errors", "kind", "words"),
    [
        ((RECOVERED, RECOVERED), (None, None), RolledBack, "h: i: start: it died; rolled back to generation 3"),
        ((UNCHANGED, UNCHANGED), (None, None), Failed, "nothing was changed"),
        ((UNCHANGED, RECOVERED), (None, None), RolledBack, "i: "),
        ((RECOVERED, STUCK), (None, None), NeedsHand, "i: the restore failed: the disk is gone"),
        ((RECOVERED, UNKNOWN), (None, Unreachable("i: no route")), RolledBack, "h: "),
        ((UNCHANGED, UNKNOWN), (None, Failed("i: the host moved")), Failed, "h: i: moved"),
        ((RECOVERED, RECOVERED), (Interrupted("interrupted"), None), Interrupted, "interrupted"),
        ((RECOVERED, CONFIRMED), (None, None), NeedsHand, "one is mixed: h is on generation 3 .*; i has confirmed gen"),
        ((UNKNOWN, CONFIRMED), (Unreachable("h: no route"), None), NeedsHand, r"h goes back by itself \(h: no route\)"),
    ],
)
def test_how_several_ends_are_one(
    two: Deployment,
    ends: tuple[dict[str, Any], ...],
    errors: tuple[DdtreeError | None, ...],
    kind: type[DdtreeError],
    words: str,
) -> None:
    it = session(two, empty_host(), empty_host())
    plan, _ = nodes.planned(it, Options())
    first, second = (Attended("txn-5", end, None, [], error) for end, error in zip(ends, errors, strict=True))
    with pytest.raises(kind, match=words) as raised:
        conclude(it, plan, dataclasses.replace(first, others=(second,)), Quiet())
    assert type(raised.value) is kind


def test_all_confirmed_is_one_outcome(two: Deployment) -> None:
    it = session(two, empty_host(), empty_host())
    plan, _ = nodes.planned(it, Options())
    ended = Attended("txn-5", CONFIRMED, None, [], None, (Attended("txn-5", CONFIRMED, None, []),))
    assert conclude(it, plan, ended, Quiet()).result == "confirmed"


@pytest.fixture(autouse=True)
def _no_evidence_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def test_the_unit_of_a_further_rank_differs_in_its_number_only(two: Deployment) -> None:
    units = [render(one, RELEASE, 1).files["unit"] for one in two.every]
    assert units[0].replace('"--node-rank" "0"', '"--node-rank" "1"') == units[1] != units[0]
