"""What a host keeps compiled answers as the whole agent does, or not at all: then the whole one is sent."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.remote.agent import Agent
from ddtree_ops.remote.transport import connect

from .endpoint import Entry


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(connect(Entry()), str(tmp_path / "root"), "svc", "process")


def probe(agent: Agent) -> dict[str, Any]:
    reply = agent.call("probe", model_paths=[], releases=[], port=None)
    del reply["system"]["time"], reply["disk_free"]
    return reply


def kept_file(agent: Agent) -> Path:
    (found,) = Path(agent.root, "bin").glob("ddtree-host.*")
    return found


def test_a_host_without_it_is_sent_the_whole(agent: Agent) -> None:
    assert agent.kept is None
    assert probe(agent)["agent_sha256"] is None
    assert agent.kept is False
    assert not Path(agent.root).exists(), "a question writes nothing"


def test_what_is_kept_answers_the_same(agent: Agent) -> None:
    agent.bootstrap()
    whole = Agent(agent.transport, agent.root, "svc", "process")
    told = probe(agent)
    assert agent.kept is True
    kept_file(agent).unlink()
    assert probe(whole) == told and whole.kept is False


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def of_another_agent(path: Path) -> None:
    path.write_bytes(b"0" * 64 + path.read_bytes()[64:])


def of_another_python(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(f"{sys.hexversion:x}".encode(), b"2070000", 1))


def others_may_write(path: Path) -> None:
    path.chmod(0o666)


def a_link(path: Path) -> None:
    path.rename(path.with_name("there"))
    path.symlink_to("there")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "harm", [damaged, of_another_agent, of_another_python, others_may_write, a_link, cut_short, a_pipe]
)
def test_what_is_not_right_is_never_run(agent: Agent, harm: Any) -> None:
    agent.bootstrap()
    before = probe(agent)
    harm(kept_file(agent))
    assert probe(agent) == before
    assert agent.kept is False


def test_it_is_written_anew_where_it_is_another_python_s(agent: Agent) -> None:
    agent.bootstrap()
    of_another_python(kept_file(agent))
    agent.bootstrap()
    probe(agent)
    assert agent.kept is True
    before = kept_file(agent).stat().st_mtime_ns
    agent.bootstrap()
    assert kept_file(agent).stat().st_mtime_ns == before
