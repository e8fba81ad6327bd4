"""The agent against a small host script run by a real python3."""

from __future__ import annotations

import pytest

from ddtree_ops.errors import DdtreeError, Failed, Locked, NeedsHand, Unreachable, UsageError
from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.transport import connect

from .endpoint import Entry

SCRIPT = """
import json, os, sys

def main_request(text):
    request = json.loads(text)
    verb = request["verb"]
    if verb == "echo":
        reply = {"ok": True, "request": request, "flags": sys.flags.isolated}
    elif verb == "fail":
        reply = {"ok": False, "error": {"kind": request["kind"], "message": "no \\x1b[31mred", "hint": "do this"}}
    elif verb == "die":
        sys.stderr.write("Traceback: boom")
        return 1
    elif verb == "babble":
        reply = {"fine": "yes"}
    print(json.dumps(reply))
    return 0
"""


@pytest.fixture
def agent() -> Agent:
    return Agent(connect(Entry()), "/opt/ddtree", "svc", "process", source=SCRIPT)


def test_the_request_arrives_whole(agent: Agent) -> None:
    value = "quotes ' \" and \\ and \n and 🌳 and \u2028"
    reply = agent.call("echo", as_root=False, value=value, nested={"a": [1, None, True]})
    assert reply["request"] == {
        "verb": "echo",
        "root": "/opt/ddtree",
        "service": "svc",
        "supervisor": "process",
        "unit_dir": "/etc/systemd/system",
        "value": value,
        "nested": {"a": [1, None, True]},
    }
    assert reply["flags"] == 1
    assert "ok" not in reply


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("usage", UsageError),
        ("moved", Failed),
        ("locked", Locked),
        ("disk-full", Failed),
        ("refused", Failed),
        ("failed", Failed),
        ("stuck", NeedsHand),
        ("cut", Unreachable),
        ("of-a-later-version", Failed),
    ],
)
def test_kinds_become_errors(agent: Agent, kind: str, error: type[DdtreeError]) -> None:
    with pytest.raises(error) as caught:
        agent.call("fail", as_root=False, kind=kind)
    assert type(caught.value) is error
    assert caught.value.message == "here: fail: no ?[31mred"
    assert caught.value.hint == "do this"


@pytest.mark.parametrize(("verb", "said"), [("die", "Traceback: boom"), ("babble", "fine"), ("unheard of", "Unbound")])
def test_no_reply_is_a_failure_that_quotes_what_was_said(agent: Agent, verb: str, said: str) -> None:
    with pytest.raises(Failed, match="no answer") as caught:
        agent.call(verb, as_root=False)
    assert said in caught.value.hint


def test_plain_processes_without_root_need_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    transport = connect(Entry())
    assert not Agent(transport, "/r", "s", "process", source=SCRIPT).elevates
    assert Agent(transport, "/r", "s", "systemd", source=SCRIPT).elevates
