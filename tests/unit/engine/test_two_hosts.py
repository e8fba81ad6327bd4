"""One service on two hosts: two network namespaces joined by a cable, each with a name of its own that nobody knows."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pairs import Plain
from .process import Engine, until

pytestmark = pytest.mark.hosts
ADDRESSES = ("10.247.31.1", "10.247.31.2")
PORT = "30517"
ASK = """
import json, sys, urllib.request
asked = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(asked, timeout=20).read().decode())
"""


class Namespace:
    """A network and a host name, alive as long as the process that was born into them."""

    def __init__(self, name: str) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", f"hostname {name}; exec sleep 900"])
        self.pid = str(self._holder.pid)
        self.enter = ["nsenter", "--target", self.pid, "--net", "--uts"]
        until(lambda: self.run("hostname").strip() == name)

    def run(self, *command: str) -> str:
        return subprocess.run([*self.enter, *command], check=True, capture_output=True, text=True, timeout=60).stdout

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def hosts() -> Iterator[list[Namespace]]:
    with contextlib.ExitStack() as stack:
        made = [Namespace(f"ddtree-rank-{i}") for i in range(2)]
        for host in made:
            stack.callback(host.close)
        ends = [("eth0", "netns", host.pid) for host in made]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]], check=True)
        for host, address in zip(made, ADDRESSES, strict=True):
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        yield made


def test_two_hosts_are_one_service_until_the_cable_is_cut(
    hosts: list[Namespace], pair: Path, plain: Plain, tmp_path: Path
) -> None:
    engines = []
    for rank, host in enumerate(hosts):
        arguments = ["--model-path", str(pair / "target"), "--nnodes", "2", "--tp-size", "2", "--node-rank", str(rank)]
        arguments += ["--dist-init-addr", f"{ADDRESSES[0]}:{PORT}"]
        engines.append(Engine(tmp_path / f"log{rank}", *arguments, wrapped=host.enter))
    try:
        for engine in engines:
            engine.wait_ready()
        body = {"input_ids": [4, 9, 2], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
        url = f"{engines[0].client.base_url}/generate"
        reply = json.loads(hosts[0].run(sys.executable, "-c", ASK, url, json.dumps(body)))
        assert reply["output_ids"] == plain.greedy([4, 9, 2], 20)
        # Only rank 0's address is listened at, not every one that its host has.
        listening = hosts[0].run("ss", "--listening", "--tcp", "--numeric", "--no-header")
        assert f"{ADDRESSES[0]}:{PORT}" in listening and f"*:{PORT}" not in listening
        hosts[1].run("ip", "link", "set", "eth0", "down")
        assert [engine.process.wait(timeout=60) for engine in engines] == [1, 1]
        for engine, gone in zip(engines, ("rank 1 has gone", "rank 0, the leader, has gone"), strict=True):
            assert gone in engine.log.read_text()
    finally:
        for engine in engines:
            engine.close()
