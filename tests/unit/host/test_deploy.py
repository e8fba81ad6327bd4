from __future__ import annotations

from .box import Box


def test_deploy_confirms_and_a_second_one_replaces_it(box: Box) -> None:
    end = box.deploy("txn-1")
    assert (end["event"], end["generation"], box.who()) == ("confirmed", 1, "txn-1")
    seen = box.probe()
    assert seen["state"] == {"confirmed": 1, "pending": None}
    assert seen["active"]["state"] == "active"
    assert seen["port_owner"]["ours"]
    assert seen["unit"]["sha256"] == seen["generation"]["files"]["process.json"]
    assert seen["drift"] == []
    end = box.deploy("txn-2")
    assert (end["event"], end["generation"], box.who()) == ("confirmed", 2, "txn-2")
    assert 0 < end["downtime_s"] < 20
