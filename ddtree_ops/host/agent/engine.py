"""The process supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .base import JSON, make_dir, read_json, write_json
from .plain import Process
from .service import Service
from .system import boot_id, kill_all, start_ticks

if TYPE_CHECKING:
    from typing import IO, Any


class Engine:
    """Runs one engine without systemd: restart on failure with back-off, a capped log, nothing left behind."""

    CAP = 8 << 20
    CALM_S = 60  # an engine that ran so long starts again without back-off

    def __init__(self, service: Service) -> None:
        self.service, self.sup = service, Process(service)
        self.stopping = False
        self.restarts = 0
        self.log: IO[bytes] = (service.run / "log").open("ab")

    def write(self, data: bytes) -> None:
        """To the log, one old file kept. A full disk costs log lines, never the engine."""
        with contextlib.suppress(OSError):
            if self.log.tell() + len(data) > self.CAP:
                path = self.service.run / "log"
                path.replace(path.with_name("log.1"))
                self.log.close()
                self.log = path.open("ab")
            self.log.write(data)
            self.log.flush()

    def tell(self, state: str, **more: Any) -> None:
        with contextlib.suppress(OSError):
            status = {"state": state, "since_unix": round(time.time(), 3), "restarts": self.restarts, **more}
            write_json(self.service.run / "status.json", status)

    def spawn(self, spec: JSON) -> subprocess.Popen[bytes]:
        home = pwd.getpwuid(os.geteuid()).pw_dir
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, **spec.get("env", {})}
        return subprocess.Popen(
            spec["argv"],
            env={**env, "DDTREE_SERVICE": self.sup.marker},
            cwd=spec.get("cwd") or "/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def drain(self, child: subprocess.Popen[bytes], wait: float) -> None:
        assert child.stdout is not None
        if select.select([child.stdout], [], [], wait)[0]:
            data = os.read(child.stdout.fileno(), 1 << 16)
            if data:
                self.write(data)
            else:  # closed by the engine while it lives
                time.sleep(wait)

    def end(self, child: subprocess.Popen[bytes], grace: float) -> None:
        """SIGTERM to all, re-parented ones too; after ``grace`` SIGKILL to what is left."""
        for pid in self.sup.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while (child.poll() is None or self.sup.members()) and time.monotonic() < deadline:
            self.drain(child, 0.1)
        kill_all(lambda: [pid for pid in self.sup.members() if child.poll() is None or pid != child.pid])
        child.wait()

    def main(self, ready: Callable[[str], None]) -> None:
        """Until SIGTERM, or until the engine ends with status 0. ``ready`` is told "" or why it cannot start."""
        spec = read_json(self.service.unit_path) or {}
        grace, pause, first = float(spec.get("stop_timeout_s") or 30), 1.0, True
        while not self.stopping:
            try:
                child = self.spawn(spec)
            except (OSError, KeyError, ValueError) as error:
                self.tell("failed", result=str(error))
                ready(f"cannot start the engine: {error}")
                return
            began = time.monotonic()
            self.tell("active", pid=child.pid)
            if first:
                ready("")
                first = False
            while child.poll() is None and not self.stopping:
                self.drain(child, 0.2)
            self.drain(child, 0)
            self.end(child, grace if self.stopping else 2)
            code = child.returncode
            if self.stopping or code == 0:
                self.tell("inactive", result="stopped" if self.stopping else "exit 0")
                return
            self.write(f"ddtree-host: the engine ended with status {code}\n".encode())
            pause = 1.0 if time.monotonic() - began > self.CALM_S else min(pause * 2, 30)
            self.restarts += 1
            self.tell("activating", sub="auto-restart", result=f"exit {code}")
            until = time.monotonic() + pause
            while time.monotonic() < until and not self.stopping:
                time.sleep(0.1)
        self.tell("inactive", result="stopped")


def supervise(service: Service) -> int:
    """Fork the supervisor twice; answer once the engine was started (0) or could not be (1, the reason printed)."""
    make_dir(service.run)
    kill_all(Process(service).members)  # what a killed supervisor left
    receive, send = os.pipe()
    if os.fork():
        os.close(send)
        with os.fdopen(receive) as pipe:
            said = pipe.read() or "the supervisor ended before it said anything"
        print(said if said != "ok" else "", end="")
        return 0 if said == "ok" else 1
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    def ready(problem: str) -> None:
        os.write(send, (problem or "ok").encode())
        os.close(send)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hold = os.open(service.run / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        ready(f"another supervisor runs: {error}")
        os._exit(1)
    me = {"pid": os.getpid(), "start": start_ticks(os.getpid()), "boot": boot_id()}
    engine = Engine(service)
    signal.signal(signal.SIGTERM, lambda *_: setattr(engine, "stopping", True))
    write_json(service.run / "supervisor.json", me)
    try:
        engine.main(ready)
    finally:
        os._exit(0)
