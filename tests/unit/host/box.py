"""A host in a temporary directory: the agent run as the client runs it, the process supervisor, a scripted engine."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree_ops.host import source

ENGINE = Path(__file__).with_name("engine.py")
PYTHON = os.environ.get("DDTREE_TEST_PYTHON", sys.executable)  # the agent's; any from 3.9 on
SECRET = "swordfish-4711"
JSON = dict[str, Any]


class Refused(Exception):
    """The agent's error reply."""

    def __init__(self, error: JSON) -> None:
        super().__init__(f"{error['kind']}: {error['message']}")
        self.kind, self.message, self.error = error["kind"], error["message"], error


# A service's port is given before anything listens there. These are below those that a system gives to connections
# (from 32768 on), and each worker of a run has its own, from a place that differs between runs.
SHARE = 2000
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_ports = itertools.cycle(range(SHARE))
for _ in range(os.getpid() % SHARE):
    next(_ports)


def free_port() -> int:
    """A port of this machine that nobody listens on. Raises OSError where all of this worker's are taken."""
    for _ in range(SHARE):
        port = 16_000 + WORKER * SHARE + next(_ports)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


class Box:
    """One service ``web`` under ``root``; every call is a process of its own, as over SSH."""

    supervisor = "process"
    unit_dir = "/etc/systemd/system"
    python = PYTHON

    def __init__(self, root: Path, service: str = "web") -> None:
        self.root, self.service, self.port = root, service, free_port()
        self.dir = root / "services" / service
        self.agent = root / "bin" / "ddtree-host"
        self.marker = f"{root}:{service}"

    def request(self, verb: str, **fields: Any) -> JSON:
        base = {"verb": verb, "root": str(self.root), "service": self.service, "supervisor": self.supervisor}
        return {**base, "unit_dir": self.unit_dir, **fields}

    def execute(self, argv: list[str], stdin: bytes = b"", timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, check=False)

    def call(self, verb: str, **fields: Any) -> JSON:
        """The reply; raises Refused."""
        script = f"{source()}\nraise SystemExit(main_request({json.dumps(self.request(verb, **fields))!r}))\n"
        done = self.execute([self.python, "-I", "-"], script.encode())
        assert done.returncode == 0, done.stderr.decode()
        reply: JSON = json.loads(done.stdout)
        if reply.pop("ok"):
            return reply
        raise Refused(reply["error"])

    def cli(self, verb: str, *more: str) -> list[str]:
        return [self.python, "-I", str(self.agent), verb, "--root", str(self.root), "--service", self.service, *more]

    def bootstrap(self) -> JSON:
        return self.call("bootstrap", source_b64=base64.b64encode(source().encode()).decode())

    def probe(self, **more: Any) -> JSON:
        return self.call("probe", model_paths=[], release=None, port=self.port, **more)

    def files(self, n: int, **engine: Any) -> dict[str, str]:
        """The generation's files that start an engine with these arguments."""
        words = [f"{key}={value}" for key, value in {"port": self.port, **engine}.items()]
        argv = [sys.executable, "-I", str(ENGINE), *words]
        return {"process.json": json.dumps({"argv": argv, "env": {"ENGINE_API_KEY": SECRET}, "cwd": "/"})}

    def plan(self, txn: str, *, expect: JSON | None = None, wanted: JSON | None = None, **more: Any) -> JSON:
        """A sealed plan for an engine of these arguments (``more`` replaces whole keys of the plan)."""
        seen = self.probe()
        n = seen["next_generation"]
        engine = more.pop("engine", {"who": txn})
        generation = {"n": n, "files": {**self.files(n, **engine), "profile.json": "{}"}, "meta": {}}
        return {
            "format": 1, "txn": txn, "who": "ann", "client": "desk", "workspace_commit": None, "action": "deploy",
            "root": str(self.root), "service": self.service, "supervisor": self.supervisor,
            "unit_dir": self.unit_dir, "expect": expect or self.expectation(seen),
            "adopt": False, "overwrite": False, "generation": generation, "target": n, "release": None,
            "health": {"port": self.port, "timeout_s": 20, "expect": wanted or {}, "fatal": ["^FATAL"]},
            "stop_timeout_s": 10, "gate_timeout_s": 30, "lease_s": 20, **more,
        }  # fmt: skip

    @staticmethod
    def expectation(seen: JSON) -> JSON:
        unit = seen["unit"]
        return {
            "state": seen["state"],
            "unit_sha256": unit["sha256"],
            "dropins": unit["dropins"],
            "next_generation": seen["next_generation"],
        }

    # the journal

    def journal(self) -> str:
        path = self.dir / "journal.jsonl"
        return path.read_text() if path.exists() else ""

    def entries(self, txn: str) -> list[JSON]:
        found = []
        for line in self.journal().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [entry for entry in found if entry["txn"] == txn]

    def wait(self, txn: str, step: str, event: str | None = None, timeout: float = 30) -> JSON:
        """The first entry of that step (and event), once it is there."""
        deadline = time.monotonic() + timeout
        while True:
            for entry in self.entries(txn):
                if entry["step"] == step and event in (None, entry["event"]):
                    return entry
            assert time.monotonic() < deadline, f"no {step} {event}: {self.entries(txn)}"
            time.sleep(0.02)

    def end(self, txn: str, timeout: float = 30) -> JSON:
        return self.wait(txn, "end", timeout=timeout)

    def steps(self, txn: str) -> list[str]:
        return [f"{entry['step']} {entry['event']}" for entry in self.entries(txn)]

    def deploy(self, txn: str, *, passed: bool = True, **more: Any) -> JSON:
        """Apply, send the verdict when the gate opens, return the end."""
        self.call("apply", plan=self.plan(txn, **more))
        deadline = time.monotonic() + 30
        while not any(step.startswith(("gate begin", "end")) for step in self.steps(txn)):
            assert time.monotonic() < deadline, self.steps(txn)
            time.sleep(0.02)
        if "gate begin" in self.steps(txn):
            self.verdict(txn, passed)
        return self.end(txn)

    def verdict(self, txn: str, passed: bool = True) -> JSON:
        kind = "EXACT" if passed else "FAIL"
        return self.call("verdict", txn=txn, verdict={"passed": passed, "kind": kind, "reasons": []})

    # what runs

    def who(self) -> str | None:
        """Which engine answers; None when none does."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.port}/server_info", timeout=2) as answer:
                return str(json.load(answer)["who"])
        except OSError:
            return None

    def applier(self) -> int:
        return int(json.loads((self.dir / "lock").read_text())["pid"])

    def members(self) -> list[int]:
        """All processes of the service, by their environment."""
        return self.marked("DDTREE_SERVICE")

    def marked(self, name: str) -> list[int]:
        """The processes whose environment has this service under ``name``."""
        mark = f"{name}={self.marker}".encode()
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def supervisors(self) -> list[int]:
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if path.name.isdigit() and str(self.agent).encode() in words and str(self.root).encode() in words:
                    found.append(int(path.name))
        return found


@contextlib.contextmanager
def box_in(root: Path) -> Iterator[Box]:
    """A bootstrapped box; at the end nothing of it runs any more, and the test fails if it left temporary files."""
    box = Box(root)
    box.bootstrap()
    try:
        yield box
        left = [str(path) for path in root.rglob("*.tmp*") if ".tmp" in path.name]
        assert left == [], left
    finally:
        for pid in (*box.supervisors(), *box.members()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
