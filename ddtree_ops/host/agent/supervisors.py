"""How a service is run, and systemd's way of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .base import (
    DROPIN,
    JSON,
    HostError,
    fsync_dir,
    make_dir,
    named,
    read_bytes,
    remove,
    run,
    safe,
)
from .form import Form, install_links, put_entry, read_entry
from .system import kill_all, pids, start_ticks

RUNTIME_UNITS = Path("/run/systemd/system")
GUARD = "ddtree-guard.conf"  # the drop-in of guard.py

if TYPE_CHECKING:
    from typing import Any

    from .service import Service


class Supervisor(ABC):
    """How a service is run. `Systemd` and `Process` differ only here; all that decides is common."""

    name = ""

    def __init__(self, service: Service) -> None:
        self.service = service

    # facts
    @abstractmethod
    def show(self) -> JSON:
        """{"state" (systemd's ActiveState words), "sub", "pid", "since_unix", "restarts", ...}."""

    @contextlib.contextmanager
    def one_look(self) -> Iterator[None]:
        """Inside the block, in which nothing may change anything, `show` may answer what it answered at its head."""
        yield

    @abstractmethod
    def members(self) -> list[int]:
        """Every process of the service, re-parented ones too."""

    @abstractmethod
    def now(self) -> Form: ...

    @abstractmethod
    def form_of(self, n: int) -> Form:
        """What generation ``n`` installs. Raises failed when the generation is not whole."""

    @abstractmethod
    def log_mark(self) -> Any:
        """The present end of the service's log, for `log_since`."""

    @abstractmethod
    def log_since(self, mark: Any) -> tuple[list[str], Any]:
        """Raw lines since the mark, and the next mark."""

    @abstractmethod
    def log_tail(self, lines: int) -> list[str]: ...

    def going_down(self) -> bool:
        """Whether the machine is shutting down: nothing can be started, the boot one-shot will finish."""
        return False

    @abstractmethod
    def verify(self, n: int) -> JSON:
        """Check generation ``n`` before anything stops; details for the journal, failed when it cannot start."""

    # acts
    @abstractmethod
    def place(self, form: Form) -> None:
        """Install the form; the one function both the switch and the restore use."""

    @abstractmethod
    def start(self, timeout: float, block: bool = True) -> None: ...

    @abstractmethod
    def ask_stop(self, timeout: float, block: bool = True) -> None: ...

    @abstractmethod
    def spawn(self, argv: list[str], txn: str, stop_s: float) -> None:
        """Start the applier detached from us."""

    def halt(self, timeout: float) -> None:
        """Stop the service and prove that none of its processes is left."""
        self.ask_stop(timeout)
        kill_all(self.members)


class Systemd(Supervisor):
    """systemd as root: unit, drop-ins and enabling links in ``unit_dir``."""

    name = "systemd"
    PROPERTIES = (
        "LoadState,ActiveState,SubState,Result,MainPID,NRestarts,ActiveEnterTimestampMonotonic,UnitFileState,"
        "FragmentPath,DropInPaths,ControlGroup"
    )
    _seen: JSON | None = None

    @property
    def unit(self) -> str:
        return f"{self.service.name}.service"

    def systemctl(self, *argv: str, timeout: float = 30) -> str:
        done = run(["systemctl", "--no-ask-password", *argv], timeout)
        if done.returncode != 0:
            raise HostError("failed", f"systemctl {' '.join(argv)}: {safe(done.stderr.strip() or done.stdout.strip())}")
        return done.stdout

    @contextlib.contextmanager
    def one_look(self) -> Iterator[None]:
        self._seen = self.show()
        try:
            yield
        finally:
            self._seen = None

    def show(self) -> JSON:
        if self._seen is not None:
            return self._seen
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
            "dropin_paths": [path for path in shlex.split(got.get("DropInPaths", "")) if Path(path).name != GUARD],
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
            self.service.require_whole(n, "unit", *(f"dropins/{name}" for name in dropins))
            whole = {name: data for name, data in dropins.items() if data is not None}
            return Form(adopted["kind"], unit or b"", adopted["mode"], owner, whole, adopted["links"])
        if unit is None:
            raise HostError("failed", f"generation {n} has no unit")
        self.service.require_whole(n, "unit")
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
        import tempfile  # not at the head: a question needs none of it

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
