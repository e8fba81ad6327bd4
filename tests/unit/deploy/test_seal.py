"""What a plan asks of the host's half, and what it says of a service that runs while it is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_ops.deploy.facts import facts
from ddtree_ops.deploy.plan import make_plan, seal
from ddtree_ops.model import Deployment

from .test_plan import RELEASE, deployed_host, with_profile


def test_each_word_of_the_sealed_plan_is_what_the_host_takes_it_for(ct200: Deployment) -> None:
    plan = make_plan(with_profile(ct200, "b16k4"), RELEASE, facts(deployed_host(ct200)))
    sealed = seal(plan, ct200, txn="t1", author={"who": "ann", "client": "desk", "workspace_commit": "c0"})
    assert (sealed["generation"]["n"], sealed["generation"]["meta"]) == (4, plan.meta)
    words = {
        "format": 1,
        "txn": "t1",
        "who": "ann",
        "client": "desk",
        "workspace_commit": "c0",
        "action": "deploy",
        "root": "/opt/ddtree",
        "service": ct200.service_name,
        "supervisor": "systemd",
        "unit_dir": "/etc/systemd/system",
        "target": 4,
        "release": RELEASE,
        "stop_timeout_s": ct200.profile.stop_timeout_s,
        "gate_timeout_s": ct200.profile.exactness.time_limit_s + sealed["lease_s"],
    }
    assert {key: sealed[key] for key in words} == words
    assert seal(replace(plan, action="rollback"), ct200, txn="t2", author={})["generation"] is None


@pytest.mark.parametrize("state", ["active", "activating", "reloading"])
def test_a_service_that_has_begun_is_restarted(ct200: Deployment, state: str) -> None:
    seen = facts(deployed_host(ct200, active={"state": state, "pid": 7}, last_downtime_s=41.5))
    plan = make_plan(with_profile(ct200, "b16k4"), RELEASE, seen)
    limit = ct200.profile.stop_timeout_s + ct200.profile.load_timeout_s
    assert plan.restarts == f"{ct200.service_name} (pid 7)"
    assert (plan.downtime_s, plan.downtime_limit_s) == (41.5, limit)


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_a_service_that_does_not_run_is_not(ct200: Deployment, state: str) -> None:
    seen = facts(deployed_host(ct200, active={"state": state}, last_downtime_s=41.5))
    plan = make_plan(with_profile(ct200, "b16k4"), RELEASE, seen)
    assert (plan.restarts, plan.downtime_s, plan.downtime_limit_s) == (None, 0.0, 0.0)


def test_the_rules_that_applied_to_a_profile_are_none_of_its_keys(ct200: Deployment) -> None:
    """They follow from the host; a release of ddtree that knows one more restarts nothing."""
    reply = deployed_host(ct200)
    reply["generation"]["meta"]["profile"] |= {"name": "old", "applied_rules": ["an older one"]}
    assert not any("rules" in line or "name" in line for line in make_plan(ct200, RELEASE, facts(reply)).reasons)
