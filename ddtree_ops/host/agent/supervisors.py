"""How a service is run: by systemd, or by our own process supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import (
    DROPIN,
    JSON,
    HostError,
    fsync_dir,
    make_dir,
    named,
    read_bytes,
    read_json,
    remove,
    run,
    safe,
    write_json,
)
from .form import Form, install_links, put_entry, read_entry
from .system import boot_id, kill_all, pids, start_ticks

if TYPE_CHECKING:
    from .service import Service


class Supervisor:
    """How a service is run. `Systemd` and `Process` differ only here; all that decides is common."""

    name = ""

    def __init__(self, service: Service) -> None:
        self.service = service

    # facts
    def show(self) -> JSON:
        """{"state" (systemd's ActiveState words), "sub", "pid", "since_unix", "restarts", ...}."""
        raise NotImplementedError

    def members(self) -> list[int]:
        """Every process of the service, re-parented ones too."""
        raise NotImplementedError

    def now(self) -> Form:
        raise NotImplementedError

    def form_of(self, n: int) -> Form:
        """What generation ``n`` installs. Raises failed when the generation is not whole."""
        raise NotImplementedError

    def log_mark(self) -> Any:
        """The present end of the service's log, for `log_since`."""
        raise NotImplementedError

    def log_since(self, mark: Any) -> tuple[list[str], Any]:
        """Raw lines since the mark, and the next mark."""
        raise NotImplementedError

    def log_tail(self, lines: int) -> list[str]:
        raise NotImplementedError

    def going_down(self) -> bool:
        """Whether the machine is shutting down: nothing can be started, the boot one-shot will finish."""
        return False

    def verify(self, n: int) -> JSON:
        """Check generation ``n`` before anything stops; details for the journal, failed when it cannot start."""
        raise NotImplementedError

    # acts
    def place(self, form: Form) -> None:
        """Install the form; the one function both the switch and the restore use."""
        raise NotImplementedError

    def start(self, timeout: float, block: bool = True) -> None:
        raise NotImplementedError

    def ask_stop(self, timeout: float, block: bool = True) -> None:
        raise NotImplementedError

    def spawn(self, argv: list[str], txn: str, stop_s: float) -> None:
        """Start the applier detached from us."""
        raise NotImplementedError

    def halt(self, timeout: float) -> None:
        """Stop the service and prove that none of its processes is left."""
        self.ask_stop(timeout)
        if self.members():
            kill_all(self.members)


class Systemd(Supervisor):
    """systemd as root: unit, drop-ins and enabling links in ``unit_dir``."""

    name = "systemd"
    PROPERTIES = (
        "LoadState,ActiveState,SubState,Result,MainPID,NRestarts,ActiveEnterTimestampMonotonic,UnitFileState,"
        "FragmentPath,DropInPaths,ControlGroup"
    )

    @property
    def unit(self) -> str:
        return f"{self.service.name}.service"

    def systemctl(self, *argv: str, timeout: float = 30) -> str:
        done = run(["systemctl", "--no-ask-password", *argv], timeout)
        if done.returncode != 0:
            raise HostError("failed", f"systemctl {' '.join(argv)}: {safe(done.stderr.strip() or done.stdout.strip())}")
        return done.stdout

    def show(self) -> JSON:
        lines = self.systemctl("show", self.unit, f"--property={self.PROPERTIES}").splitlines()
        got = dict(line.partition("=")[::2] for line in lines)
        entered = int(got.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
        active = got.get("ActiveState") in ("active", "reloading", "deactivating")
        return {
            "state": got.get("ActiveState", "unknown"),
            "sub": got.get("SubState", ""),
            "pid": int(got.get("MainPID") or 0) or None,
            "since_unix": round(time.time() - time.monotonic() + entered, 3) if entered and active else None,
            "restarts": int(got.get("NRestarts") or 0),
            "result": got.get("Result", ""),
            "load": got.get("LoadState", ""),
            "enabled": got.get("UnitFileState") or None,
            "fragment": got.get("FragmentPath") or None,
            "dropin_paths": shlex.split(got.get("DropInPaths", "")),
            "cgroup": got.get("ControlGroup") or None,
        }

    def members(self) -> list[int]:
        own = self.show()["cgroup"] or f"/system.slice/{self.unit}"  # a container's unit of that name is not ours
        found = []
        for pid in pids():
            groups = (read_bytes(Path(f"/proc/{pid}/cgroup")) or b"").decode(errors="replace").splitlines()
            paths = [line.split(":", 2)[-1] for line in groups]
            if any(path == own or path.startswith(f"{own}/") for path in paths) and start_ticks(pid) is not None:
                found.append(pid)
        return found

    def _links(self) -> dict[str, str]:
        base, found = self.service.unit_dir, {}
        for path in sorted(base.iterdir()) if base.is_dir() else []:
            if path.is_symlink():
                if path.name != self.unit and path.readlink().name == self.unit:
                    found[path.name] = str(path.readlink())
            elif path.is_dir() and path.suffix in (".wants", ".requires", ".upholds"):
                inner = path / self.unit
                if inner.is_symlink():
                    found[f"{path.name}/{self.unit}"] = str(inner.readlink())
        return found

    def now(self) -> Form:
        entry = read_entry(self.service.unit_path)
        dropins = {}
        for path in sorted(self.service.dropin_dir.glob("*.conf")):
            named(DROPIN, path.name, "drop-in")
            inner = read_entry(path)
            if inner.kind != "file":
                raise HostError("refused", f"drop-in {path} is not a regular file")
            dropins[path.name] = inner.data
        return Form(entry.kind, entry.data, entry.mode, entry.owner, dropins, self._links())

    def form_of(self, n: int) -> Form:
        generation = self.service.generation(n)
        unit = read_bytes(generation / "unit")
        adopted = self.service.meta(n).get("adopted")
        if adopted is not None:
            owner = (adopted["uid"], adopted["gid"])
            dropins = {name: read_bytes(generation / "dropins" / name) for name in adopted["dropins"]}
            if (adopted["kind"] != "none" and unit is None) or None in dropins.values():
                raise HostError("failed", f"generation {n} is not whole")
            whole = {name: data for name, data in dropins.items() if data is not None}
            return Form(adopted["kind"], unit or b"", adopted["mode"], owner, whole, adopted["links"])
        if unit is None:
            raise HostError("failed", f"generation {n} has no unit")
        return Form("file", unit, links=install_links(self.service.unit_path, unit.decode(errors="replace")))

    def place(self, form: Form) -> None:
        base, drop = self.service.unit_dir, self.service.dropin_dir
        now = self.now()
        for name in now.dropins:
            if name not in form.dropins:
                remove(drop / name)
        if form.dropins:
            make_dir(drop)
        for name, data in form.dropins.items():
            put_entry(drop / name, Form("file", data))
        if not form.dropins and drop.is_dir() and not any(drop.iterdir()):
            drop.rmdir()
            fsync_dir(base)
        put_entry(self.service.unit_path, form)
        for link in now.links:
            if link not in form.links:
                remove(base / link)
        for link, target in form.links.items():
            make_dir((base / link).parent)
            put_entry(base / link, Form("link", os.fsencode(target)))
        self.systemctl("daemon-reload", timeout=90)

    def start(self, timeout: float, block: bool = True) -> None:
        run(["systemctl", "reset-failed", self.unit])
        self.systemctl("start", self.unit, *([] if block else ["--no-block"]), timeout=timeout)

    def ask_stop(self, timeout: float, block: bool = True) -> None:
        if not block:
            run(["systemctl", "stop", "--no-block", self.unit])
            return
        done = run(["systemctl", "stop", self.unit], timeout)
        if done.returncode == 124:
            run(["systemctl", "kill", "--signal=SIGKILL", self.unit])
            self.systemctl("stop", self.unit, timeout=30)
        elif done.returncode != 0 and self.show()["state"] not in ("inactive", "failed"):
            raise HostError("failed", f"systemctl stop: {safe(done.stderr.strip())}")

    def verify(self, n: int) -> JSON:
        form = self.form_of(n)
        if form.kind != "file":
            return {}
        with tempfile.TemporaryDirectory(dir=self.service.dir, prefix=".verify-") as temp:
            path = Path(temp) / self.unit
            path.write_bytes(form.data)
            done = run(["systemd-analyze", "verify", "--man=no", str(path)], timeout=60)
        said = [line.replace(f"{temp}/", "") for line in safe(done.stderr).splitlines()[:20]]
        if done.returncode != 0:
            raise HostError("failed", "systemd-analyze verify refused the unit: " + " | ".join(said))
        return {"warnings": said} if said else {}

    def _journalctl(self, *argv: str) -> list[str]:
        done = run(["journalctl", "--quiet", "--no-pager", *argv], timeout=20)
        return done.stdout.splitlines()

    def log_mark(self) -> Any:
        lines = self._journalctl("-n", "1", "-o", "json", "--output-fields=__CURSOR")
        with contextlib.suppress(ValueError, IndexError, AttributeError):
            return str(json.loads(lines[-1]).get("__CURSOR"))
        return None

    def log_since(self, mark: Any) -> tuple[list[str], Any]:
        where = [f"--after-cursor={mark}"] if mark else ["--boot"]
        lines = self._journalctl("-u", self.unit, "-o", "cat", "-n", "3000", "--show-cursor", *where)
        if lines and lines[-1].startswith("-- cursor: "):
            mark = lines.pop()[len("-- cursor: ") :]
        return lines, mark

    def log_tail(self, lines: int) -> list[str]:
        return self._journalctl("-u", self.unit, "-o", "short-iso", "-n", str(lines))

    def going_down(self) -> bool:
        return run(["systemctl", "is-system-running"]).stdout.strip() == "stopping"

    def spawn(self, argv: list[str], txn: str, stop_s: float) -> None:
        service = self.service
        after = [*service.agent_argv("recover"), "--reason", "'the applier died'"]
        properties = ["Type=exec", "KillMode=mixed", f"TimeoutStopSec={int(stop_s)}", "OOMPolicy=continue"]
        command = ["systemd-run", "--quiet", "--collect", f"--unit=ddtree-apply-{service.name}"]
        command += [f"--property={text}" for text in (*properties, "ExecStopPost=" + " ".join(after))]
        deadline = time.monotonic() + 5
        while True:
            done = run([*command, "--", *argv])
            if done.returncode == 0:
                return
            if "already" not in done.stderr:
                raise HostError("failed", f"systemd-run: {safe(done.stderr.strip())}")
            if time.monotonic() > deadline:
                raise HostError("locked", f"ddtree-apply-{service.name} still runs")
            time.sleep(0.2)  # the last applier's unit goes away just after its lock


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
        mark = b"DDTREE_SERVICE=" + self.marker.encode()
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
        return Form("file", data, 0o600)

    def place(self, form: Form) -> None:
        put_entry(self.service.unit_path, form)

    def start(self, timeout: float, block: bool = True) -> None:
        if self.supervisor_pid() is None:
            done = run([*self.service.agent_argv("supervise")], timeout=min(timeout, 60))
            if done.returncode != 0:
                raise HostError("failed", f"supervise: {safe(done.stdout.strip() or done.stderr.strip())}")

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
