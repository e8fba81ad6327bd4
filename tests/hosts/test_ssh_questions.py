"""The first question of a command is asked by ssh(1): answered and refused as over the open connection."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path

import pytest

from ddtree_ops.errors import Unreachable
from ddtree_ops.remote.transport import Transport, connect, connect_when_needed

from ..unit.remote.test_hostkeys import ONE
from .harness import TestHost
from .test_ssh import entry

# the first question of a command, by ssh(1)


def later(host: TestHost, **changes: object) -> Transport:
    return connect_when_needed(entry(host, **changes))


@pytest.fixture
def no_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ssh(1) may answer."""

    def refused(*_: object) -> None:
        raise AssertionError("Fabric was asked")

    monkeypatch.setattr("ddtree_ops.remote.later.connect", refused)


@pytest.mark.usefixtures("no_fabric")
@pytest.mark.parametrize("user", ["root", "deploy"])
def test_a_question_is_answered_by_ssh_alone(testhost: TestHost, user: str) -> None:
    with later(testhost, user=user, sudo=user == "deploy") as transport:
        assert transport.ask(["id", "-un"]).stdout == f"{user}\n".encode()
        assert transport.ask(["id", "-un"], root=True).stdout == b"root\n"
        nasty = ["a b", "$HOME", "'", '"', "\\", "\n", "*", "é"]
        told = transport.ask(["python3", "-c", "import json,sys; print(json.dumps(sys.argv[1:]))", *nasty])
        assert json.loads(told.stdout) == nasty
        done = transport.ask(["sh", "-c", "cat; echo gone >&2; exit 7"], stdin=b"in")
        assert (done.code, done.stdout, done.stderr) == (7, b"in", b"gone\n")


@pytest.mark.usefixtures("no_fabric")
def test_a_question_with_the_key_of_a_file(testhost: TestHost) -> None:
    with later(testhost, host_key=None, known_hosts=str(testhost.known_hosts)) as transport:
        assert transport.ask(["true"]).code == 0


def test_a_refused_question_is_refused_in_the_same_words(testhost: TestHost, tmp_path: Path) -> None:
    """Whatever ssh(1) says is not shown: Fabric dials and explains."""
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    for changes in (
        {"host_key": None},
        {"host_key": ONE},
        {"port": 1},
        {"user": "nobody-here"},
        {"identity_file": str(tmp_path / "none")},
        {"identity_file": str(other)},
        {"address": "no-such-host.invalid"},
    ):
        with pytest.raises(Unreachable) as plain:
            connect(entry(testhost, **changes))
        with later(testhost, **changes) as transport, pytest.raises(Unreachable) as asked:
            transport.ask(["touch", "/tmp/asked"])
        assert (asked.value.message, asked.value.hint) == (plain.value.message, plain.value.hint)
    assert testhost.run(["test", "-e", "/tmp/asked"]).returncode == 1


def test_a_question_where_sudo_wants_a_password(testhost: TestHost) -> None:
    with later(testhost, user="asks", sudo=True) as transport, pytest.raises(Unreachable, match="wants a password"):
        transport.ask(["id"], root=True)
    with later(testhost, user="plain") as transport, pytest.raises(Unreachable, match="needs root, and plain is not"):
        transport.ask(["id"], root=True)


def test_a_question_over_a_cut_link_ends(testhost: TestHost) -> None:
    began = time.monotonic()
    with later(testhost) as transport:
        timer = threading.Timer(1.5, testhost.cut)
        timer.start()
        try:
            with pytest.raises(Unreachable):
                transport.ask(["sleep", "60"])
        finally:
            timer.join()
            testhost.uncut()
    assert time.monotonic() - began < 40


def test_what_changes_something_goes_by_the_open_connection(testhost: TestHost) -> None:
    with later(testhost) as transport:
        first = transport.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout
        assert transport.ask(["sh", "-c", "echo $SSH_CONNECTION"]).stdout == first
