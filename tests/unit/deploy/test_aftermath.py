"""How a transaction's last word is told, and what is kept of one that ended badly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ddtree_ops.deploy import aftermath
from ddtree_ops.deploy.aftermath import Attended, conclude, keep_evidence
from ddtree_ops.deploy.facts import facts
from ddtree_ops.deploy.plan import Plan, make_plan
from ddtree_ops.deploy.session import Session
from ddtree_ops.errors import DdtreeError, Failed, NeedsHand, RolledBack
from ddtree_ops.exactness.verdict import Kind
from ddtree_ops.model import Deployment

from .test_attend import Quiet
from .test_plan import RELEASE, empty_host

JOURNAL = [
    {"seq": 1, "step": "evidence", "event": "done", "where": "/opt/ddtree/evidence/1"},
    {"seq": 2, "step": "evidence", "event": "done", "where": "/opt/ddtree/evidence/2"},
    {"seq": 3, "step": "confirm", "event": "done"},
]


Told = Callable[..., DdtreeError]


@pytest.fixture
def told(ct200: Deployment, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What `conclude` raises for a last word, and for what the service that is back answers when it is asked."""
    plan: Plan = make_plan(ct200, RELEASE, facts(empty_host()))
    session = cast(Session, SimpleNamespace(deployment=ct200))

    def of(end: dict[str, Any], again: tuple[Kind, str] | None = None) -> DdtreeError:
        monkeypatch.setattr(aftermath, "prove_again", lambda session, generation, ui: again)
        with pytest.raises(DdtreeError) as caught:
            conclude(session, plan, Attended("t1", end, None, JOURNAL), Quiet())
        return caught.value

    return of


BACK = {"event": "recovered", "reason": "the gate said FAIL", "generation": 2, "proven": True, "log": ["last words"]}


def test_what_is_back_and_answers_exactly_is_a_rollback(told: Told) -> None:
    error = told(BACK, (Kind.EXACT, "it answers: EXACT over 64 tokens"))
    assert isinstance(error, RolledBack)
    said = "ct200: the gate said FAIL; rolled back to generation 2; it answers: EXACT over 64 tokens"
    assert error.message == said
    assert "last words" in error.hint and "evidence on the host: /opt/ddtree/evidence/2" in error.hint
    assert "evidence/1" not in error.hint


def test_what_is_back_and_wrong_needs_a_hand(told: Told) -> None:
    error = told(BACK, (Kind.FAIL, "it answers: FAIL over 64 tokens"))
    assert isinstance(error, NeedsHand)
    assert "back on generation 2; it answers: FAIL over 64 tokens" in error.message
    which = "--host ct200 --service sglang-k26-ddtree"
    commands = [f"ddtree verify-exactness {which}", f"ddtree history {which}", f"ddtree stop {which}"]
    assert error.hint.splitlines()[:3] == commands


def test_back_to_nothing_is_told_as_such(told: Told) -> None:
    error = told({"event": "recovered"})
    assert isinstance(error, RolledBack)
    assert error.message == "ct200: no reason given; rolled back to nothing deployed"


def test_a_host_that_was_not_touched_is_told_so(told: Told) -> None:
    error = told({"event": "unchanged", "reason": "no space"})
    assert isinstance(error, Failed) and error.message == "ct200: no space; nothing was changed"


def test_a_restore_that_failed_names_what_to_run(told: Told) -> None:
    error = told({"event": "needs-hand", "reason": "disk", "commands": ["systemctl start x"]})
    assert isinstance(error, NeedsHand) and error.message == "ct200: the restore failed: disk"
    assert error.hint.splitlines()[0] == "systemctl start x"
    assert told({"event": "needs-hand"}).hint.splitlines()[0] == "ddtree recover --host ct200"


def test_nodes_that_are_mixed_name_each_and_the_deploy_that_mends_it(ct200: Deployment) -> None:
    plan: Plan = make_plan(ct200, RELEASE, facts(empty_host()))
    both = replace(plan, others=(replace(plan, host="b300"),))
    other = msgspec.structs.replace(ct200, host=msgspec.structs.replace(ct200.host, name="b300"))
    one = SimpleNamespace(deployment=other)
    session = cast(Session, SimpleNamespace(deployment=ct200, every=[SimpleNamespace(deployment=ct200), one]))
    lost = Attended("t1", {}, None, [], error=Failed("no answer"))
    ended = Attended("t1", {"event": "confirmed"}, None, [], others=(lost,))
    with pytest.raises(NeedsHand) as caught:
        conclude(session, both, ended, Quiet())
    assert caught.value.message == (
        "sglang-k26-ddtree is mixed: ct200 has confirmed generation 1; b300 goes back by itself (no answer); "
        "its nodes do not meet, so nothing is served"
    )
    which = "--host ct200 --service sglang-k26-ddtree"
    lines = caught.value.hint.splitlines()
    assert lines[:2] == [f"ddtree deploy {which}", f"ddtree status {which}"] and lines[2].endswith("b300/t1.json")


def test_the_evidence_has_all_that_is_known(ct200: Deployment) -> None:
    ended = Attended("t1", BACK, None, JOURNAL)
    lines = keep_evidence(ct200, ended, Quiet(), (Kind.FAIL, "wrong"))
    (path,) = ct200.workspace_path.rglob("ct200/t1.json")
    assert json.loads(path.read_text()) == {
        "host": "ct200",
        "service": "sglang-k26-ddtree",
        "txn": "t1",
        "end": BACK,
        "verdict": None,
        "afterwards": {"kind": "FAIL", "said": "wrong"},
        "journal": JOURNAL,
    }
    assert lines[0].endswith("ct200/t1.json") and lines[1:] == ["evidence on the host: /opt/ddtree/evidence/2"]


def test_evidence_that_cannot_be_kept_is_said_and_stops_nothing(ct200: Deployment) -> None:
    (ct200.workspace_path / aftermath.FOLDER).write_text("in the way")
    heard = Quiet()
    assert keep_evidence(ct200, Attended("t1", BACK, None, []), heard) == []
    assert len(heard.said) == 1 and heard.said[0].startswith("the evidence is not kept here: ")
