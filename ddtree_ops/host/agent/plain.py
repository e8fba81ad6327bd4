"""A service without systemd: our own supervisor process runs the engine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .base import JSON, PLAIN, HostError, read_bytes, read_json, run, safe, write_json
from .form import Form, put_entry, read_entry
from .supervisors import Supervisor
from .system import boot_id, kill_all, pids, start_ticks

if TYPE_CHECKING:
    from typing import Any


class Process(Supervisor):
    """Without systemd: `supervise` runs the engine. No promise over a reboot.

    Every process of the engine carries ``DDTREE_SERVICE`` in its environment: so re-parented ones are found too.
    """

    name = "process"

    @property
    def marker(self) -> str:
        return f"{self.service.root}:{self.service.name}"

    def supervisor_pid(self) -> int | None:
        """The live supervisor; a reused pid is told by its start time and the boot."""
        known = read_json(self.service.run / "supervisor.json") or {}
        pid = known.get("pid")
        if isinstance(pid, int) and known.get("boot") == boot_id() and known.get("start") == start_ticks(pid):
            return pid
        return None

    def show(self) -> JSON:
        status = read_json(self.service.run / "status.json") or {}
        state = status.get("state", "inactive")
        if self.supervisor_pid() is None:
            state = "inactive" if state == "inactive" else "failed"
        alive = state in ("active", "activating")
        return {
            "state": state,
            "sub": status.get("sub", "") if alive else "dead",
            "pid": status.get("pid") if state == "active" else None,
            "since_unix": status.get("since_unix") if state == "active" else None,
            "restarts": status.get("restarts", 0),
            "result": status.get("result", ""),
            "load": "loaded" if self.service.unit_path.exists() else "not-found",
            "enabled": None,
            "fragment": str(self.service.unit_path) if self.service.unit_path.exists() else None,
            "dropin_paths": [],
            "cgroup": None,
        }

    def members(self) -> list[int]:
        return self._marked("DDTREE_SERVICE")

    def _marked(self, name: str) -> list[int]:
        mark = f"{name}={self.marker}".encode()
        found = []
        for pid in pids():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and start_ticks(pid) is not None:
                    found.append(pid)
        return found

    def now(self) -> Form:
        return read_entry(self.service.unit_path)

    def form_of(self, n: int) -> Form:
        data = read_bytes(self.service.generation(n) / "process.json")
        if data is None:
            raise HostError("failed", f"generation {n} has no process.json")
        self.service.require_whole(n, "process.json")
        return Form("file", data, 0o600)

    def place(self, form: Form) -> None:
        put_entry(self.service.unit_path, form)

    def start(self, timeout: float, block: bool = True) -> None:
        if self.supervisor_pid() is None:
            env = {**PLAIN, "DDTREE_SUPERVISES": self.marker}
            done = run([*self.service.agent_argv("supervise")], timeout=min(timeout, 60), env=env)
            if done.returncode != 0:
                raise HostError("failed", f"supervise: {safe(done.stdout.strip() or done.stderr.strip())}")

    def halt(self, timeout: float) -> None:
        """Also what is only about to supervise: the one that started it may have been killed meanwhile."""
        self.ask_stop(timeout)
        kill_all(lambda: self._marked("DDTREE_SUPERVISES"))  # first: it starts members
        kill_all(self.members)

    def ask_stop(self, timeout: float, block: bool = True) -> None:
        pid = self.supervisor_pid()
        if pid is None and not (self.service.run / "status.json").exists():
            return  # it never ran
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + timeout
            while self.supervisor_pid() == pid and time.monotonic() < deadline:
                time.sleep(0.05)
            if self.supervisor_pid() == pid:
                os.kill(pid, signal.SIGKILL)
                kill_all(self.members)
        write_json(self.service.run / "status.json", {"state": "inactive", "restarts": 0})

    def verify(self, n: int) -> JSON:
        spec = read_json(self.service.generation(n) / "process.json") or {}
        argv, env = spec.get("argv"), spec.get("env", {})
        if not (isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv)):
            raise HostError("failed", "process.json: argv is not a list of words")
        if not (isinstance(env, dict) and all(isinstance(value, str) for value in env.values())):
            raise HostError("failed", "process.json: env is not an object of strings")
        if not (argv[0].startswith("/") and os.access(argv[0], os.X_OK)):
            raise HostError("failed", f"process.json: {argv[0]} is not an executable")
        return {}

    def log_mark(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            status = (self.service.run / "log").stat()
            return [status.st_ino, status.st_size]
        return [0, 0]

    def log_since(self, mark: Any) -> tuple[list[str], Any]:
        data = b""
        for name in ("log.1", "log"):
            with contextlib.suppress(FileNotFoundError), (self.service.run / name).open("rb") as file:
                status = os.fstat(file.fileno())
                if name == "log.1" and status.st_ino != mark[0]:
                    continue
                file.seek(mark[1] if status.st_ino == mark[0] else 0)
                data += file.read(4 << 20)
                mark = [status.st_ino, file.tell()]
        keep = data.rfind(b"\n") + 1  # a line that is still being written is read next time
        return data[:keep].decode(errors="replace").splitlines(), [mark[0], mark[1] - (len(data) - keep)]

    def log_tail(self, lines: int) -> list[str]:
        data = b"".join(read_bytes(self.service.run / name, 1 << 20, tail=True) or b"" for name in ("log.1", "log"))
        return data.decode(errors="replace").splitlines()[-lines:]

    def spawn(self, argv: list[str], txn: str, stop_s: float) -> None:
        with (self.service.txn_dir(txn) / "applier.log").open("ab") as log:
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)
