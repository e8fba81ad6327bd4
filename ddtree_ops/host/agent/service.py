"""One service on this host: paths, state, lock, generations."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .base import (
    JSON,
    NAME,
    RESERVE,
    SECRET_NAME,
    TXN,
    USER,
    HostError,
    absolute,
    digest,
    fsync_dir,
    make_dir,
    named,
    read_bytes,
    read_json,
    remove,
    run,
    safe,
    write_file,
    write_json,
)
from .form import Journal, settings
from .plain import Process
from .supervisors import GUARD, RUNTIME_UNITS, Supervisor, Systemd
from .system import start_ticks

if TYPE_CHECKING:
    from typing import Any


class Service:
    """Paths, state, lock, journal and generations of one service."""

    def __init__(self, root: Path, name: str, supervisor: str, unit_dir: Path) -> None:
        self.root, self.name, self.unit_dir = root, named(NAME, name, "service"), unit_dir
        self.dir = root / "services" / name
        self.run = self.dir / "run"
        self.journal = Journal(self.dir / "journal.jsonl")
        self.agent = root / "bin" / "ddtree-host"
        if supervisor not in ("systemd", "process"):
            raise HostError("usage", f"supervisor: {supervisor!r} is neither systemd nor process")
        systemd = supervisor == "systemd"
        self.unit_path = unit_dir / f"{name}.service" if systemd else self.dir / "process.json"
        self.dropin_dir = unit_dir / f"{name}.service.d"
        self.boot_link = unit_dir / "multi-user.target.wants" / f"ddtree-recover@{name}.service"
        self.reserves = [self.dir / ".reserve", *([unit_dir / f".{name}.service.reserve"] if systemd else [])]
        self.sup: Supervisor = Systemd(self) if systemd else Process(self)

    @classmethod
    def at(cls, root: Path, name: str) -> Service:
        """From what the last apply recorded, for the command line and at boot."""
        named(NAME, name, "service")
        known = read_json(root / "services" / name / "service.json")
        if known is None:
            raise HostError("refused", f"nothing was ever deployed as {name} under {root}")
        return cls(root, name, str(known.get("supervisor")), absolute(known.get("unit_dir"), "unit_dir"))

    def agent_argv(self, verb: str) -> list[str]:
        return [sys.executable, "-I", str(self.agent), verb, "--root", str(self.root), "--service", self.name]

    # state

    def state(self) -> JSON:
        """{"confirmed", "pending", "last"}; raises stuck when the file is there and damaged."""
        path = self.dir / "state.json"
        found = read_json(path)
        if found is None:
            if path.exists() and os.access(path, os.R_OK):
                raise HostError("stuck", f"{path} is damaged; restore it by hand from the journal's last end entry")
            found = {}
        return {"confirmed": found.get("confirmed"), "pending": found.get("pending"), "last": found.get("last")}

    def set_state(self, confirmed: int | None, pending: JSON | None, last: JSON | None) -> None:
        write_json(self.dir / "state.json", {"confirmed": confirmed, "pending": pending, "last": last})

    def stand_down(self, txn: str, event: str, confirmed: int | None, **more: Any) -> JSON:
        """The one atomic step that ends a transaction, in either direction; the journal is completed from it."""
        last = {"t": round(time.time(), 3), "txn": txn, "step": "end", "event": event, "generation": confirmed, **more}
        self.set_state(confirmed, None, last)
        return last

    def close_journal(self) -> None:
        """Complete the journal by the terminal entry that ``state.json`` knows."""
        last = self.state()["last"]
        if last is None:
            return
        ends = [entry for entry in self.journal.entries(last["txn"]) if entry.get("step") == "end"]
        if not ends or ends[-1].get("event") != last["event"]:
            self.journal.append(last)

    def close_unaccepted(self, reason: str) -> None:
        """End the journal's last transaction where its applier died before ``state.json`` knew of it."""
        begun = [
            entry["txn"] for entry in self.journal.entries() if (entry["step"], entry["event"]) == ("accept", "begin")
        ]
        if begun and not any(entry["step"] == "end" for entry in self.journal.entries(begun[-1])):
            self.log(begun[-1], "end", "unchanged", generation=self.state()["confirmed"], reason=reason)

    def log(self, txn: str, step: str, event: str, **more: Any) -> None:
        self.journal.append({"txn": txn, "step": step, "event": event, "mono": round(time.monotonic(), 3), **more})

    def try_log(self, txn: str, step: str, event: str, **more: Any) -> None:
        """While restoring, a journal that cannot be written must not stop the restore."""
        try:
            self.log(txn, step, event, **more)
        except OSError as error:
            print(f"ddtree-host: journal: {error}; {step} {event} {more}", file=sys.stderr)

    # lock

    @contextlib.contextmanager
    def lock(self, txn: str, who: str, client: str = "", what: str = "") -> Iterator[None]:
        """Hold the service's flock, ``what`` for; locked when another does. What the file says is for display only.

        A probe tests the lock by taking it shared for an instant, hence the short patience.
        """
        make_dir(self.dir)
        fd = os.open(self.dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        held = False
        try:
            deadline = time.monotonic() + 1
            while not held:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise self.locked_by(self.holder() or {}) from None
                    time.sleep(0.05)
            says = {"txn": txn, "who": who, "client": client, "what": what, "since": time.time(), "pid": os.getpid()}
            with contextlib.suppress(OSError):  # a full disk must not keep a recovery from running
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps({**says, "start": start_ticks(os.getpid())}).encode(), 0)
            yield
        finally:
            if held:
                os.ftruncate(fd, 0)
            os.close(fd)

    def locked_by(self, holder: JSON) -> HostError:
        """The refusal that says who holds the lock since when, and for what."""
        since = holder.get("since") or 0
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since)) if since else "an unknown time"
        by = f"{holder.get('who') or '?'} from {holder.get('client') or '?'} since {when}"
        by += f" for {holder.get('what') or '?'} (txn {holder.get('txn')})"
        return HostError("locked", f"{self.name} is locked by {safe(by)}", lock=holder)

    def holder(self) -> JSON | None:
        """Who holds the lock, "alive" by the flock itself; None when nobody does and nobody left a name."""
        try:
            fd = os.open(self.dir / "lock", os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                alive = False
            except BlockingIOError:
                alive = True
            said: Any = {}
            with contextlib.suppress(ValueError):
                said = json.loads(file.read(4096))
        if not alive and not said:
            return None
        return {
            "txn": "",
            "who": "",
            "client": "",
            "what": "",
            "since": 0.0,
            **(said if isinstance(said, dict) else {}),
            "alive": alive,
        }

    # transactions and generations

    def txn_dir(self, txn: str) -> Path:
        return self.dir / "txn" / named(TXN, txn, "txn")

    def plan(self, txn: str) -> JSON:
        plan = read_json(self.txn_dir(txn) / "plan.json", 64 << 20)
        if plan is None:
            raise HostError("failed", f"the plan of {txn} is missing or damaged")
        return plan

    def generation(self, n: int) -> Path:
        return self.dir / "generations" / str(n)

    def generations(self) -> list[int]:
        base = self.dir / "generations"
        return sorted(int(path.name) for path in base.iterdir() if path.name.isdigit()) if base.is_dir() else []

    def next_generation(self) -> int:
        return max([0, *self.generations()]) + 1

    def adopt_generation(self) -> int:
        """The number an adopted unit gets: 0, or the next free one when 0 is taken."""
        return self.next_generation() if 0 in self.generations() else 0

    def meta(self, n: int) -> JSON:
        meta = read_json(self.generation(n) / "generation.json")
        if meta is None:
            raise HostError("failed", f"generation {n} is missing or not whole")
        return meta

    def write_generation(self, n: int, files: Mapping[str, bytes], meta: JSON) -> None:
        """A generation is there whole or not at all."""
        import shutil  # not at the head: a question needs none of it

        base = make_dir(self.dir / "generations")
        temp = base / f".{n}.{os.urandom(4).hex()}.tmp"
        group = service_group()
        try:
            temp.mkdir(0o755)
            for name, data in files.items():
                make_dir((temp / name).parent)
                private = Path(name).name in ("env", "process.json")
                owner = (0, group) if private and group is not None else None
                write_file(temp / name, data, 0o640 if owner else 0o600 if private else 0o644, owner)
            hashes = {name: digest(data) for name, data in files.items()}
            write_json(temp / "generation.json", {**meta, "sha256": hashes})
            fsync_dir(temp)
            temp.rename(self.generation(n))
            fsync_dir(base)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise

    def secret_values(self, n: int | None) -> tuple[str, ...]:
        """Secret values that generation ``n`` hands its service: credentials, and variables with such a name."""
        if n is None:
            return ()
        pairs: list[tuple[str, str]] = []
        env = (read_bytes(self.generation(n) / "env") or b"").decode(errors="replace")
        unit = (read_bytes(self.generation(n) / "unit") or b"").decode(errors="replace")
        for key, _, value in (line.partition("=") for line in env.splitlines()):
            pairs.append((key.strip(), value.strip().strip("'\"")))
        for line in settings(unit, "Environment"):
            with contextlib.suppress(ValueError):
                pairs += [(word.partition("=")[0], word.partition("=")[2]) for word in shlex.split(line)]
        spec = (read_json(self.generation(n) / "process.json") or {}).get("env")
        pairs += [(key, str(value)) for key, value in spec.items()] if isinstance(spec, dict) else []
        values = {value for key, value in pairs if SECRET_NAME.search(key)}
        values |= {value for _, value in self.credentials(unit)}
        values |= {json.dumps(value)[1:-1] for value in values}  # as they stand in JSON texts
        return tuple(sorted((value for value in values if len(value) >= 4), key=len, reverse=True))

    def credentials(self, unit: str) -> list[tuple[str, str]]:
        """(name, value) of the unit's LoadCredential files that we may read."""
        found = []
        for line in settings(unit, "LoadCredential"):
            name, _, path = line.partition(":")
            data = read_bytes(Path(path), 4096) if path.startswith("/") else None
            if data:
                found.append((name, data.decode(errors="replace").strip()))
        return found

    def api_key(self, n: int | None) -> str | None:
        """The key the service wants from its callers, from its credential of that name."""
        unit = b"" if n is None else read_bytes(self.generation(n) / "unit") or b""
        found = dict(self.credentials(unit.decode(errors="replace")))
        return found.get("api-key") or found.get("api_key")

    def drift(self) -> list[str]:
        """How the installed files differ from the confirmed generation's; without one, what stands in the way."""
        confirmed, now = self.state()["confirmed"], self.sup.now()
        if confirmed is None:
            foreign = now.kind != "none" or now.dropins or self.sup.show()["load"] not in ("not-found", "masked", "")
            return ["a unit of this name exists and is not ours"] if foreign else []
        guarded = self.sup.name == "systemd" and (RUNTIME_UNITS / f"{self.name}.service.d" / GUARD).exists()
        left = ["the guard of an earlier deploy is still there"] if guarded else []
        try:
            return [*self.sup.form_of(confirmed).differs(now), *left, *self.damaged(confirmed)]
        except HostError as damaged:
            return [damaged.message]

    def require_whole(self, n: int, *names: str) -> None:
        """Raise failed unless these files of generation ``n`` are as they were written: nothing else is installed."""
        for line in self.damaged(n):
            if line.split(" of generation ")[0] in names:
                raise HostError("failed", line)

    def damaged(self, n: int) -> list[str]:
        """Which files of generation ``n`` are no longer as they were written, as far as we may read them."""
        found, base = [], self.generation(n)
        for name, sha in sorted((self.meta(n).get("sha256") or {}).items()):
            path = base / name
            if digest(read_bytes(path, 8 << 20)) != sha and (os.access(path, os.R_OK) or not path.exists()):
                found.append(f"{name} of generation {n} was edited or is gone")
        return found

    # disk

    def hold_reserve(self) -> None:
        """Keep some disk aside that a recovery may give back to itself: it must work on a full disk."""
        for path in self.reserves:
            if not path.exists():
                write_file(path, os.urandom(RESERVE), 0o600)

    def free_reserve(self) -> None:
        for path in self.reserves:
            with contextlib.suppress(OSError):
                remove(path)

    def tidy(self, confirmed: int | None) -> None:
        """After an end: no reserve, and no boot one-shot for a service that is not there."""
        self.free_reserve()
        if confirmed is None and self.sup.name == "systemd":
            remove(self.boot_link)
            run(["systemctl", "reset-failed", f"{self.name}.service"])

    def sweep(self) -> None:
        """Remove what an interrupted writer left. Only under the lock."""
        import shutil  # not at the head: a question needs none of it

        left = [path for base in (self.dir, self.dropin_dir, self.run) for path in base.glob(".*.tmp")]
        for path in [*left, *(self.dir / "generations").rglob(".*.tmp")]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # it may have been inside one
        for path in (
            *self.unit_dir.glob(f".{self.name}.service.*.tmp"),
            *self.unit_dir.glob(f"*/.{self.name}.service.*.tmp"),
        ):
            path.unlink()
        for path in self.dir.glob(".verify-*"):
            shutil.rmtree(path)


def service_group() -> int | None:
    """Group id of the service user when we are root and it exists."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(USER).pw_gid if os.geteuid() == 0 else None
    return None
