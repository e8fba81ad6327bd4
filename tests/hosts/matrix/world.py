"""One test host with a workspace of its own, on which rows happen; and what must be so when a row has ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ddtree_ops.deploy.session import open_session
from ddtree_ops.model import load_workspace, resolve
from ddtree_ops.release.build import FORMAT
from ddtree_ops.remote.ship import ship

from ..harness import TestHost
from ..machine import HarnessError, wait_for
from ..test_main_job import PORT, SERVICE, Workspace
from .scripted import continuation

CHECKOUT = Path(__file__).parents[3]
CLIENT = [sys.executable, "-m", "tests.hosts.matrix.client"]
HOME = f"/opt/ddtree/services/{SERVICE}"
UNIT = f"/etc/systemd/system/{SERVICE}.service"
PROFILES = ("b8k4", "b16k4")
BUDGETS = {"b8k4": 8, "b16k4": 16}
PROMPTS = [list(range(start, start + 9)) for start in range(0, 160, 20)]
# A lease is 60 s, and what comes after it is a restore. No limit here is a promise: they end rows that hang.
SETTLED_S = 400
MOMENT_S = 240
CLIENT_S = 900
ANSWER_S = 60
SCRIPTED = {
    "extends": "tiny",
    "load_timeout_s": 40,
    "stop_timeout_s": 10,
    "exactness": {"concurrency": [1], "max_new_tokens": 16, "prompts": "prompts.jsonl", "time_limit_s": 60},
}
ASK = """
import json, sys, urllib.request
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}{path}", data)
    return json.load(urllib.request.urlopen(request, timeout=10))
how = {"temperature": 0, "max_new_tokens": 24}
info = ask("/server_info")
asked = [{"input_ids": ids, "sampling_params": how} for ids in json.loads(sys.argv[2])]
outputs = [ask("/generate", body)["output_ids"] for body in asked]
print(json.dumps({"budget": info.get("speculative_ddtree_budget"), "outputs": outputs}))
"""
FILL = """
fallocate -l $(df --output=avail -B1 /opt | tail -1) /opt/fill.1 || true
sync
for bs in 1M 4k 1k; do dd if=/dev/zero of=/opt/fill.$bs bs=$bs status=none 2>/dev/null || true; done
sync
"""


class RowFailed(Exception):
    """A row did not end as declared; the message says how it did."""


class ScriptedRelease:
    """`scripted.py` under the id of the reference engine's release: what the client then finds installed."""

    def __init__(self, release: str) -> None:
        here = Path(__file__).parent
        modules = "venv/lib/python3.11/site-packages"
        texts = {
            f"{modules}/ddtree_ops/__init__.py": b"",
            f"{modules}/ddtree_ops/engine/__init__.py": b"",
            f"{modules}/ddtree_ops/engine/__main__.py": (here / "scripted.py").read_bytes(),
        }
        self._files = {hashlib.sha256(text).hexdigest(): text for text in texts.values()}
        self._folder = Path(os.environ.get("XDG_CACHE_HOME", "/tmp")) / "ddtree-scripted"
        files = [
            {"path": path, "sha256": hashlib.sha256(text).hexdigest(), "size": len(text), "mode": 0o644}
            for path, text in sorted(texts.items())
        ]
        self.manifest: dict[str, Any] = {
            "format": FORMAT,
            "id": release,
            "engine": "reference",
            "arch": "none",
            "requires": {"python": "3.11", "machine": "x86_64", "glibc": "2.28"},
            "pins": [],
            "patches": [],
            "files": files,
            "smoke": ["import ddtree_ops.engine"],
            "total_size": sum(len(text) for text in texts.values()),
        }

    def blob(self, sha256: str) -> Path:
        path = self._folder / sha256[:2] / sha256
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._files[sha256])
        return path


class World:
    """The host, the workspace, and which of the two profiles is proven (``old``) and which is tried (``new``).

    ``others``: further hosts of the workspace, brought to the same beginning.
    """

    def __init__(
        self, host: TestHost, folder: Path, *, base: str = "scripted", others: Sequence[TestHost] = ()
    ) -> None:
        folder.mkdir(parents=True)
        self.host, self.base, self.others = host, base, others
        self.workspace = Workspace(folder, dict.fromkeys((host, *others), "root"), base=base)
        if base == "scripted":
            self.workspace.program = CLIENT
            lines = [json.dumps({"input_ids": ids}) for ids in PROMPTS]
            (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        self.workspace.profile("scripted", **SCRIPTED)
        self.workspace.profile("reference", extends="tiny", exactness={"max_new_tokens": 24})
        self.clean = False
        self.old, self.new = PROFILES
        self.pid = ""
        self._logs = 0
        self._clients: list[Client] = []

    # the state that rows begin in

    def ready(self) -> None:
        """The old profile is deployed, proven and running; on an empty disk where the row before left anything else."""
        for host in (self.host, *self.others):
            host.up()
        if not self.clean:
            self.old, self.new = PROFILES
            for host in (self.host, *self.others):
                host.reset()
                self.install(host.name)
        if self.others or not self.clean:
            self.workspace.ddtree(*self.everywhere("deploy", self.old), "--overwrite")
        self.clean = False
        self.pid = self.main_pid()

    def install(self, name: str) -> None:
        """The release; the reference engine's comes by the deploy itself."""
        if self.base == "scripted":
            made = self.workspace.json("plan", "--host", name, "--profile", self.old, code=3)["hosts"][0]["plan"]
            with open_session(resolve(load_workspace(self.workspace.path), name, SERVICE, None)) as session:
                session.agent.bootstrap()
                ship(session, ScriptedRelease(made["release"]))

    def everywhere(self, verb: str, profile: str) -> list[str]:
        """The words that do it to all of the workspace's hosts."""
        return [verb, "--host", "all", "--profile", profile, "--yes", "--no-snapshot"]

    # the client

    def words(self, *words: str) -> list[str]:
        """For this host, unless they say for which."""
        return list(words) if "--host" in words else [*words[:1], "--host", self.host.name, *words[1:]]

    def ddtree(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.workspace.ddtree(*self.words(*words), code=code)

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        return self.workspace.json(*self.words(*words), code=code)

    def start(self, *words: str) -> Client:
        """A client in the background; by default it deploys the new profile."""
        self._logs += 1
        said = self.workspace.path.parent / f"{self.host.name}-{self._logs}.log"
        argv = self.words(*(words or ("deploy", "--profile", self.new, "--yes", "--no-snapshot")))
        client = Client([*self.workspace.program, *argv], self.workspace, said)
        self._clients.append(client)
        return client

    def end_clients(self) -> None:
        """None may outlive its row."""
        for client in self._clients:
            client.kill()
        self._clients.clear()

    # the moment

    def halt(self, moment: str) -> None:
        self.host.sh("rm -f /run/ddtree-halted")
        self.host.put("/run/ddtree-halt", moment.encode())

    def halted(self, client: Client) -> None:
        """Wait until the applier stands at the moment."""

        def there() -> bool:
            if self.host.run(["test", "-e", "/run/ddtree-halted"]).returncode == 0:
                return True
            if client.code() is not None:
                raise RowFailed(f"the client ended with {client.code()} before the moment: {client.said()[-600:]}")
            return False

        wait_for("the moment", there, MOMENT_S)

    def go_on(self) -> None:
        self.host.sh(f"rm -f /run/ddtree-halted; systemctl kill -s CONT ddtree-apply-{SERVICE}")

    def fill(self) -> None:
        self.host.sh(FILL)

    def unfill(self) -> None:
        self.host.sh("rm -f /opt/fill.*; sync")

    # how it ended

    def evidence(self) -> list[Path]:
        """What the workspace keeps of deploys that were refused or undone here."""
        return list((self.workspace.path / "evidence" / self.host.name).glob("*.json"))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.host.sh(f"cat {HOME}/state.json"))
        return found

    def main_pid(self) -> str:
        return self.host.sh(f"systemctl show -P MainPID {SERVICE}").strip()

    def applying(self) -> bool:
        units = self.host.sh(f"systemctl list-units --all --plain --no-legend 'ddtree-apply-*' {SERVICE}.service")
        busy = any(word in units for word in ("ddtree-apply-", "activating", "deactivating"))
        return busy or self.state()["pending"] is not None

    def wait_settled(self) -> None:
        wait_for("the host to settle", lambda: not self.applying(), SETTLED_S)

    def serves(self, host: TestHost | None = None) -> str | None:
        """The profile whose service answers exactly; None when nothing answers. Raises RowFailed for wrong tokens."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            done = (host or self.host).run(["python3", "-c", ASK, str(PORT), json.dumps(PROMPTS)])
            if done.returncode == 0:
                break
            active = (host or self.host).sh(f"systemctl show -P ActiveState {SERVICE}").strip()
            if active not in ("active", "activating") or time.monotonic() > deadline:
                return None
            time.sleep(0.2)
        told = json.loads(done.stdout)
        if self.base == "scripted" and told["outputs"] != [continuation(ids, 24) for ids in PROMPTS]:
            raise RowFailed("what serves gives wrong tokens")
        return next((name for name, budget in BUDGETS.items() if budget == told["budget"]), f"budget {told['budget']}")

    def end(self) -> str:
        """new, old, untouched (old, and not even restarted) or stopped."""
        serves = self.serves()
        if serves is None:
            return "stopped"
        if serves == self.old:
            return "untouched" if self.main_pid() == self.pid else "old"
        return "new" if serves == self.new else f"neither: {serves}"

    def strays(self) -> list[str]:
        """What a deploy must not leave: processes, units, locks, guards, temporary files."""
        found = []
        lines = self.host.sh("ps axo args").splitlines()
        found += [line for line in lines if "ddtree-host" in line or "sudo" in line.split()[:1]]
        engines = [line for line in lines if "ddtree_ops.engine" in line]
        found += engines[1:]
        units = self.host.sh(
            "systemctl list-units --all --plain --no-legend 'ddtree-apply-*' 'run-*.service'; "
            "systemctl --failed --plain --no-legend"
        )
        found += units.splitlines()
        names = (".*.tmp", ".reserve", f".{SERVICE}.service.reserve", ".verify-*", "ddtree-guard.conf", "*.part")
        left = " -o ".join(f"-name '{name}'" for name in names)
        found += self.host.sh(f"find /opt/ddtree /etc/systemd /run/systemd/system /var/tmp {left}").splitlines()
        found += self.host.sh("ls /run | grep ^ddtree- || true").splitlines()
        holder = self.host.run(["flock", "--nonblock", "--shared", f"{HOME}/lock", "true"])
        if holder.returncode:
            found.append("the lock is held")
        if self.state()["pending"] is not None:
            found.append("a deploy is pending")
        return found


class Client:
    """A running ``ddtree``, its output in a file."""

    def __init__(self, argv: list[str], workspace: Workspace, said: Path) -> None:
        self._file = said
        with said.open("wb") as out:
            self.process = subprocess.Popen(
                argv,
                cwd=workspace.path,
                env=workspace.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def said(self) -> str:
        return self._file.read_text(errors="replace")

    def code(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float = CLIENT_S) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def cut(world: World) -> Iterator[None]:
    """The link is cut inside the block."""
    world.host.cut()
    try:
        yield
    finally:
        with contextlib.suppress(HarnessError):
            world.host.uncut()


def edit_inventory(world: World, **keys: Any) -> None:
    """Change the host's inventory file; None takes a key away."""
    file = world.workspace.path / "inventories" / f"{world.host.name}.yaml"
    inventory = {**yaml.safe_load(file.read_text()), **keys}
    kept = {key: value for key, value in inventory.items() if value is not None}
    file.write_text(yaml.safe_dump(kept, sort_keys=False))
