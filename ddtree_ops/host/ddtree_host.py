#!/usr/bin/env -S python3 -I
"""The host's half of ddtree-ops: one standard-library file (Python >= 3.9), root-owned, outside the releases.

It runs in two ways: by stdin (``python3 -I -``), the client appending ``raise SystemExit(main_request(TEXT))``, and as
``<root>/bin/ddtree-host VERB`` once ``bootstrap`` wrote it. A request is one JSON object, its reply one JSON document.

Layout under ``<root>``: bin/, releases/<id>/, store/<aa>/<sha256>, services/<name>/{lock, state.json, journal.jsonl,
txn/<txn>/, generations/<n>/, run/}. The *switch file* of a service is ``<unit_dir>/<name>.service`` (systemd) or
``services/<name>/process.json`` (process supervisor).

How a deploy stays safe:

* One process, the applier, holds the service's flock for its whole life and walks `STEPS`; each step is journaled
  (fsync) before and after. Before the first step ``state.json`` says *pending*.
* Confirm and stand-down are one fsynced rename of ``state.json`` each; ``state.json`` is the truth, the journal its
  story. ``state.last`` carries the terminal entry, so a journal cut short is completed by whoever comes next.
* `recover` is the only code that restores. It runs under the same flock: called by the applier on any failure, by
  systemd when the applier died (ExecStopPost), by the boot one-shot, by the verb. It is idempotent.
* Every file of state or unit is replaced by temp + fsync + rename + fsync of the directory (`write_file`).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import pwd
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

JSON = dict[str, Any]
USER = "ddtree"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
TXN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{3,63}")
RELEASE = re.compile(r"[0-9a-f]{16,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE = re.compile(r"[a-z][a-z0-9._-]{0,63}")
DROPIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,200}\.conf")
ROOT = re.compile(r"(/[A-Za-z0-9_+=@,~-][A-Za-z0-9._+=@,~-]*|/\.[A-Za-z0-9_+=@,~-][A-Za-z0-9._+=@,~-]*)+")
TEXT_CAP = 256 * 1024
LOG_CAP = 64 * 1024
RESERVE = 256 * 1024
POLL_S = 0.3
CRASH_LOOP = 3  # restarts during one wait after which a service is said to loop
SETTLE_S = 2.0  # without health facts, active for so long counts as healthy


# ---------------------------------------------------------------- errors and what may be named


class HostError(Exception):
    """What the client is told. Kinds: usage, moved, locked, disk-full, refused, failed, stuck."""

    def __init__(self, kind: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.kind, self.message, self.more = kind, message, more


def as_error(error: BaseException) -> HostError:
    """Any exception as the error the client gets; a full disk is told as such."""
    if isinstance(error, HostError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HostError("disk-full", f"no space left: {error.filename or error}")
    return HostError("failed", f"{type(error).__name__}: {error}")


def named(pattern: re.Pattern[str], value: Any, what: str) -> str:
    """``value`` when it is a string of exactly that form, else a usage error."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise HostError("usage", f"{what}: {value!r} is not of the form {pattern.pattern}")
    return value


def number(value: Any, what: str, low: float = 0, high: float = 10**7) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise HostError("usage", f"{what}: {value!r} is not a number from {low} to {high}")
    return value


def integer(value: Any, what: str, low: int = 0, high: int = 10**7) -> int:
    if not isinstance(value, int):
        raise HostError("usage", f"{what}: {value!r} is not a whole number")
    return int(number(value, what, low, high))


def absolute(value: Any, what: str) -> Path:
    """An absolute, normalised path without surprising characters (nothing a unit file or a shell would interpret)."""
    return Path(named(ROOT, value, what))


def member(request: Mapping[str, Any], key: str, kind: Any, default: Any = ...) -> Any:
    """``request[key]`` checked to be of that type."""
    value = request.get(key, default)
    if value is ... or not (isinstance(value, kind) or (default is not ... and value == default)):
        raise HostError("usage", f"{key}: missing or of the wrong type")
    return value


# ---------------------------------------------------------------- files


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(temp: Path, path: Path) -> None:
    """Rename durably."""
    temp.replace(path)
    fsync_dir(path.parent)


def write_file(path: Path, data: bytes, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
    """Replace ``path`` by ``data``: temp in the same directory, fsync, rename, fsync of the directory."""
    temp = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            file.flush()
            os.fsync(fd)
        replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def write_link(path: Path, target: str) -> None:
    """Replace ``path`` by a symlink, durably."""
    temp = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    temp.symlink_to(target)
    replace(temp, path)


def remove(path: Path) -> None:
    """Remove a file or link that may be absent, durably."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        fsync_dir(path.parent)


def make_dir(path: Path, mode: int = 0o755) -> Path:
    if not path.is_dir():
        make_dir(path.parent)
        with contextlib.suppress(FileExistsError):  # another process was faster
            path.mkdir(mode)
            path.chmod(mode)
        fsync_dir(path.parent)
    return path


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    write_file(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def read_bytes(path: Path, cap: int = TEXT_CAP, tail: bool = False) -> bytes | None:
    """At most ``cap`` bytes of a regular file, from its end with ``tail``; None when it is absent or not readable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        if tail and status.st_size > cap:
            file.seek(-cap, os.SEEK_END)
        return file.read(cap)


def read_json(path: Path, cap: int = 8 << 20) -> JSON | None:
    """A JSON object from a file; None when it is absent or damaged."""
    data = read_bytes(path, cap)
    with contextlib.suppress(ValueError):
        value = json.loads(data) if data is not None else None
        return value if isinstance(value, dict) else None
    return None


def digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def sync_filesystem(path: Path) -> None:
    """syncfs(2): all that was written below ``path`` reaches the disk, write errors are raised."""
    import ctypes  # slow to import, rarely needed

    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)


def run(argv: list[str], timeout: float = 30, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a host's program without a shell; rc 124 when it ran too long, 127 when it is absent."""
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "SYSTEMD_COLORS": "0"}
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": env, "errors": "replace", "cwd": "/", **more}
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False, **options)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"{argv[0]} did not end within {timeout:g} s")
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


# ---------------------------------------------------------------- texts that leave the host

ANSI = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
SECRET_NAME = re.compile(r"(?i)(api_?key|_key$|^key$|secret|passw|credential|(^|_)token$|auth)")
SECRET_PAIR = re.compile(  # every repetition is bounded: lines are hostile, and no line may cost quadratic time
    r"(?i)((?:api[_-]?key|password|passwd|secret|credential|(?:auth|access|hf|bearer)[_-]?token)[\w-]{0,40}"
    r"[\"']?\s{0,4}[=:]\s{0,4}[\"']?)(?!None\b|null\b|<redacted>|/(?:etc|run|opt|var|home|root|usr|srv|mnt)/)([^\s\"',)\\]{3,4000})"
)
SECRET_VALUE = re.compile(
    r"\b((?:sk|pk|rk)-[A-Za-z0-9_-]{12,400}|hf_[A-Za-z0-9]{12,400}|gh[pousr]_[A-Za-z0-9]{20,400}|AKIA[0-9A-Z]{16}"
    r"|eyJ[A-Za-z0-9_-]{10,400}\.[A-Za-z0-9._-]{10,2000})|(?<=Bearer )\S{8,4000}"
)
WORD = re.compile(r"[A-Za-z0-9+_=-]{32,}")
REDACTED = "<redacted>"


def looks_random(word: str) -> bool:
    """Whether a word reads like a key: long, upper, lower and digits mixed. Hashes (hex) and names are not."""
    kinds = (any(c.isupper() for c in word), any(c.islower() for c in word), any(c.isdigit() for c in word))
    return all(kinds) and len(set(word)) >= 16


def safe(text: str, known: tuple[str, ...] = (), cap: int = TEXT_CAP) -> str:
    """Text as it may leave the host: no control characters (newline and tab stay), no secrets, capped.

    ``known`` are secret values to remove wherever they stand; patterns catch the rest as well as patterns can.
    """
    text = CONTROL.sub("", ANSI.sub("", text[:cap]))
    for value in known:
        text = text.replace(value, REDACTED)
    text = SECRET_VALUE.sub(REDACTED, SECRET_PAIR.sub(rf"\1{REDACTED}", text))
    return WORD.sub(lambda match: REDACTED if looks_random(match[0]) else match[0], text)


def safe_json(value: Any, known: tuple[str, ...] = ()) -> Any:
    """A JSON value with every text in it made `safe`."""
    if isinstance(value, str):
        return safe(value, known)
    if isinstance(value, list):
        return [safe_json(item, known) for item in value]
    return {safe(key): safe_json(item, known) for key, item in value.items()} if isinstance(value, dict) else value


# ---------------------------------------------------------------- processes and ports


def glibc() -> str:
    with contextlib.suppress(ValueError, OSError):
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace("glibc ", "")
    return ""


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (proc(5), field 22); None when it is gone or a zombie."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if rest[0] in (b"Z", b"X") else int(rest[19])


def boot_id() -> str:
    return (read_bytes(Path("/proc/sys/kernel/random/boot_id")) or b"").decode().strip()


def pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield int(entry.name)


def kill_all(members: Callable[[], list[int]], patience: float = 10) -> None:
    """SIGKILL what ``members`` lists until it lists nothing; failed when something stays."""
    deadline = time.monotonic() + patience
    while left := members():
        if time.monotonic() > deadline:
            raise HostError("failed", f"processes of the service survive SIGKILL: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def listeners(port: int) -> set[str]:
    """Inodes of the sockets that listen on the port, on any address."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_bytes(Path(table), 32 << 20) or b"").decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def port_owner(port: int, members: list[int]) -> JSON | None:
    """Who listens on the port: {"pid", "command", "ours"}; pid None where we may not see it; None when it is free."""
    sockets = {f"socket:[{inode}]" for inode in listeners(port)}
    if not sockets:
        return None
    for pid in (*members, *pids()):
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if str(Path(entry.path).readlink()) in sockets:
                    command = (read_bytes(Path(f"/proc/{pid}/comm")) or b"").decode(errors="replace").strip()
                    return {"pid": pid, "command": safe(command), "ours": pid in members}
    return {"pid": None, "command": "", "ours": False}


def http_get(port: int, path: str, token: str | None = None, timeout: float = 5) -> tuple[int, bytes]:
    """GET from loopback as HTTP/1.0: no proxy, no redirect, the body capped, all of it within ``timeout``.

    By hand, because a server that drips bytes must not keep the applier from its deadlines. Raises OSError, or
    ValueError when the answer is not HTTP.
    """
    deadline, data = time.monotonic() + timeout, b""
    key = f"Authorization: Bearer {token}\r\n" if token else ""
    with socket.create_connection(("127.0.0.1", port), timeout) as sock:
        sock.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n{key}\r\n".encode())
        while True:
            head, found, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d{1,9})", head)
            if found and length and len(body) >= int(length[1]):
                break
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            chunk = sock.recv(1 << 16)
            if time.monotonic() > deadline or len(data) > 8 << 20:
                raise TimeoutError(f"no whole answer within {timeout:g} s and 8 MiB")
            if not chunk:
                break
            data += chunk
    status = re.match(rb"HTTP/1\.[01] (\d{3})\b", head)
    if not status:
        raise ValueError("the answer is not HTTP")
    return int(status[1]), body


def server_info(port: int, token: str | None, timeout: float = 5) -> JSON:
    """The server's resolved arguments. Raises HostError when it does not tell them."""
    problem = ""
    for path in ("/server_info", "/get_server_info"):
        try:
            code, body = http_get(port, path, token, timeout)
            info = json.loads(body) if code == 200 else None
        except Exception as error:  # whatever a server does is an answer, never our end
            problem = f"{path}: {type(error).__name__}: {error}"
            continue
        if isinstance(info, dict):
            return info
        problem = f"{path} answered {code}"
    raise HostError("failed", problem)


def same(want: Any, got: Any) -> bool:
    """JSON equality: absent equals null, 1 equals 1.0, true does not equal 1."""
    if isinstance(want, bool) or isinstance(got, bool):
        return want is got
    return bool(want == got)


def mismatches(expect: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    return [
        safe(f"{key}: wanted {json.dumps(want)}, got {json.dumps(info.get(key))}", cap=1000)
        for key, want in sorted(expect.items())
        if not same(want, info.get(key))
    ]


# ---------------------------------------------------------------- journal


class Journal:
    """Fsynced JSON lines. One writer, the holder of the service's flock; anybody may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, txn: str | None = None) -> list[JSON]:
        """All whole entries, or those of one transaction; a torn or damaged line is left out."""
        found = []
        for line in (read_bytes(self.path, 64 << 20, tail=True) or b"").split(b"\n"):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and (txn is None or entry.get("txn") == txn):
                    found.append(entry)
        return found

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line and fsync it. A torn last line, left by a crash, is cut off first."""
        fresh = not self.path.exists()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(fd).st_size
            tail = os.pread(fd, TEXT_CAP, max(0, size - TEXT_CAP))
            if tail and not tail.endswith(b"\n"):
                size -= len(tail) - (tail.rfind(b"\n") + 1)
                os.ftruncate(fd, size)
            line = json.dumps({"t": round(time.time(), 3), **entry}).encode() + b"\n"
            try:
                if os.write(fd, line) != len(line):
                    raise OSError(errno.ENOSPC, "short write", str(self.path))
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        if fresh:
            fsync_dir(self.path.parent)


# ---------------------------------------------------------------- what is installed under a service's name


@dataclass(frozen=True)
class Form:
    """All that a service's name means on disk. ``kind``: none, file (``data`` = bytes), link (``data`` = target).

    ``links`` are the symlinks that enable or alias the unit: path relative to unit_dir -> target.
    """

    kind: str = "none"
    data: bytes = b""
    mode: int = 0o644
    owner: tuple[int, int] | None = None
    dropins: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    links: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def masked(self) -> bool:
        return self.kind == "link" and self.data == b"/dev/null"

    def differs(self, now: Form) -> list[str]:
        """In words, how ``now`` differs from this form."""
        found = []
        if (self.kind, self.data) != (now.kind, now.data):
            if now.masked:
                found.append("the unit is masked")
            else:
                found.append("the unit is gone" if now.kind == "none" else "the unit was edited")
        for name in sorted({*self.dropins, *now.dropins}):
            if self.dropins.get(name) != now.dropins.get(name):
                word = "added" if name not in self.dropins else "removed" if name not in now.dropins else "edited"
                found.append(f"drop-in {name} was {word}")
        if set(self.links) != set(now.links):
            found.append(f"its links are {sorted(now.links)}, not {sorted(self.links)}")
        return found


def read_entry(path: Path) -> Form:
    """A file or link as a Form without drop-ins and links."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return Form()
    owner = (status.st_uid, status.st_gid)
    if stat.S_ISLNK(status.st_mode):
        return Form("link", os.fsencode(path.readlink()), owner=owner)
    if not stat.S_ISREG(status.st_mode) or status.st_size > TEXT_CAP:
        raise HostError("refused", f"{path} is not a regular file of at most {TEXT_CAP} bytes")
    return Form("file", path.read_bytes(), stat.S_IMODE(status.st_mode), owner)


def put_entry(path: Path, form: Form) -> None:
    """Make ``path`` what the form says; writes nothing when it is so already (a full disk does not matter then)."""
    now = read_entry(path)
    if (now.kind, now.data) == (form.kind, form.data) and (form.kind != "file" or now.mode == form.mode):
        return
    if form.kind == "none":
        remove(path)
    elif form.kind == "link":
        write_link(path, os.fsdecode(form.data))
    else:
        write_file(path, form.data, form.mode, form.owner if os.geteuid() == 0 else None)


def install_links(unit_path: Path, text: str) -> dict[str, str]:
    """What ``systemctl enable`` would make of the unit's [Install] (WantedBy, RequiredBy)."""
    links, section = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip()
        key, _, value = line.partition("=")
        kind = {"WantedBy": "wants", "RequiredBy": "requires"}.get(key.strip())
        if section == "[Install]" and kind:
            links.update({f"{target}.{kind}/{unit_path.name}": str(unit_path) for target in value.split()})
    return links


def settings(text: str, key: str) -> list[str]:
    """Values of a unit's ``key=`` lines."""
    return [line.partition("=")[2].strip() for line in text.splitlines() if line.partition("=")[0].strip() == key]


# ---------------------------------------------------------------- supervisors


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
        if pid is None:
            return
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


# ---------------------------------------------------------------- one service on this host


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
    def lock(self, txn: str, who: str, client: str = "") -> Iterator[None]:
        """Hold the service's flock; locked when another does. What the file says is for display only.

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
                        holder = self.holder() or {}
                        by = f"{holder.get('who', '?')} from {holder.get('client', '?')} (txn {holder.get('txn', '?')})"
                        raise HostError("locked", f"{self.name} is locked by {safe(by)}", lock=holder) from None
                    time.sleep(0.05)
            says = {"txn": txn, "who": who, "client": client, "since": time.time(), "pid": os.getpid()}
            with contextlib.suppress(OSError):  # a full disk must not keep a recovery from running
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps({**says, "start": start_ticks(os.getpid())}).encode(), 0)
            yield
        finally:
            if held:
                os.ftruncate(fd, 0)
            os.close(fd)

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
        base = make_dir(self.dir / "generations")
        temp = base / f".{n}.{secrets.token_hex(4)}.tmp"
        group = service_group()
        try:
            temp.mkdir(0o755)
            for name, data in files.items():
                make_dir((temp / name).parent)
                private = Path(name).name in ("env", "process.json")
                owner = (0, group) if private and group is not None else None
                write_file(temp / name, data, 0o640 if owner else 0o600 if private else 0o644, owner)
            write_json(temp / "generation.json", meta)
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
        try:
            return self.sup.form_of(confirmed).differs(now)
        except HostError as damaged:
            return [damaged.message]

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
        for base in (self.dir, self.dir / "generations", self.dropin_dir, self.run):
            for path in base.glob(".*.tmp") if base.is_dir() else ():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
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


# ---------------------------------------------------------------- healthy?


class Vigil:
    """Watches one start of a service: its state, its restarts, its log."""

    def __init__(self, service: Service, health: JSON | None, mark: Any, known: tuple[str, ...]) -> None:
        self.service, self.mark, self.known = service, mark, known
        self.fatal = [re.compile(pattern) for pattern in (health or {}).get("fatal") or []]
        self.recent: list[str] = []
        self.first: JSON | None = None
        self.steady: JSON | None = None

    def read_log(self) -> list[str]:
        lines, self.mark = self.service.sup.log_since(self.mark)
        lines = [safe(line, self.known, 2000) for line in lines]
        self.recent = (self.recent + lines)[-40:]
        return lines

    def fail(self, reason: str) -> NoReturn:
        with contextlib.suppress(HostError, OSError):
            self.read_log()
        raise HostError("failed", reason, log=self.recent[-20:])

    def look(self) -> JSON:
        """One look; failed on a dead service, a crash loop or a fatal line, and once `steady` on any restart."""
        show = self.service.sup.show()
        self.first = self.first or show
        for line in self.read_log():
            for pattern in self.fatal:
                if pattern.search(line):
                    self.fail(f"fatal line in its log: {line[:500]}")
        if show["state"] in ("failed", "inactive", "unknown"):
            self.fail(f"the service ended ({show['state']}, {show['result'] or show['sub']})")
        if show["restarts"] - self.first["restarts"] >= CRASH_LOOP:
            self.fail(f"crash loop: {show['restarts'] - self.first['restarts']} restarts")
        if self.steady and (show["pid"], show["restarts"]) != (self.steady["pid"], self.steady["restarts"]):
            self.fail("the service died after it was healthy")
        return show


def wait_healthy(service: Service, n: int, health: JSON | None, vigil: Vigil, watch: Callable[[], None]) -> None:
    """Until generation ``n`` is healthy: /health answers 200 from a process of ours and the resolved arguments are
    those expected. Without health facts: active for `SETTLE_S`. ``watch`` is called often and may raise.
    """
    limit = float((health or {}).get("timeout_s") or 120)
    deadline, active_since, last = time.monotonic() + limit, None, "it never answered"
    while True:
        watch()
        show = vigil.look()
        if health is None:
            active_since = (active_since or time.monotonic()) if show["state"] == "active" else None
            if active_since is not None and time.monotonic() - active_since >= SETTLE_S:
                break
            last = f"it was {show['state']}"
        elif show["state"] in ("active", "reloading"):
            wrong, last = try_health(service, n, health)
            if wrong:
                vigil.fail("resolved arguments are not the profile's: " + "; ".join(wrong))
            if not last:
                break
        if time.monotonic() > deadline:
            vigil.fail(f"not healthy within {limit:g} s: {last}")
        time.sleep(POLL_S)
    vigil.steady = vigil.look()


def try_health(service: Service, n: int, health: JSON) -> tuple[list[str], str]:
    """(what differs for good, why not healthy yet); both empty when healthy."""
    port, expect = int(health["port"]), health.get("expect") or {}
    try:
        code, _ = http_get(port, "/health", service.api_key(n))
    except Exception as error:  # not listening yet, or it speaks something else
        return [], f"/health: {type(error).__name__}: {error}"
    if code != 200:
        return [], f"/health answered {code}"
    owner = port_owner(port, service.sup.members())
    if owner is None or not owner["ours"]:
        return [f"port {port} is answered by a process that is not ours: {owner}"], ""
    if not expect:
        return [], ""
    try:
        return mismatches(expect, server_info(port, service.api_key(n))), ""
    except HostError as error:
        return [], error.message


# ---------------------------------------------------------------- recover: the only restore


def recover(service: Service, reason: str, boot: bool = False) -> JSON:
    """Finish what an applier left, whatever it left. The caller holds the lock. Idempotent.

    Nothing pending: only the journal is completed. Nothing stopped yet: the transaction is closed, unchanged.
    Else the generation before it is restored and proven. At boot (ordered before the service) nothing is started
    from here: the start job that waits behind us, or one queued without waiting, runs the restored unit.
    Raises stuck, with the commands to run, when the restore fails; then it stays pending and may be run again.
    """
    state = service.state()
    pending = state["pending"]
    if pending is None:
        service.close_journal()
        return {"result": "nothing", "generation": state["confirmed"]}
    txn, confirmed = pending["txn"], state["confirmed"]
    service.free_reserve()
    service.sweep()
    entries = service.journal.entries(txn)
    begun = {entry["step"] for entry in entries if entry.get("event") == "begin"}
    if entries and "stop" not in begun:
        return conclude(service, txn, "unchanged", confirmed, reason)
    if not boot and service.sup.going_down():
        service.try_log(txn, "recover", "note", reason=f"{reason}; the host is going down, its next boot recovers")
        return {"result": "left to boot", "generation": confirmed}
    service.try_log(txn, "recover", "begin", reason=reason, boot=boot)
    log = keep_evidence(service, pending, reason) if "start" in begun else []
    try:
        proven = restore(service, pending, boot)
    except Exception as error:
        told = as_error(error)
        if not boot and service.sup.going_down():
            service.try_log(txn, "recover", "note", reason=f"{told.message}; the host is going down")
            return {"result": "left to boot", "generation": confirmed}
        if boot:  # the start job that waits behind us would run what was never proven
            service.sup.ask_stop(0, block=False)
        commands = by_hand(service, pending)
        why = f"{reason}; then the restore failed: {told.message}"
        service.try_log(txn, "recover", "fail", reason=told.message, log=told.more.get("log", []))
        service.try_log(txn, "end", "stuck", generation=confirmed, reason=why, commands=commands)
        raise HostError("stuck", why, hint="\n".join(commands), commands=commands) from error
    service.try_log(txn, "recover", "done", proven=proven)
    down = downtime(entries, pending) if proven and not boot else None
    return conclude(service, txn, "recovered", pending["from"], reason, proven=proven, downtime_s=down, log=log)


def conclude(service: Service, txn: str, event: str, confirmed: int | None, reason: str, **more: Any) -> JSON:
    """Stand down and complete the journal; what cannot be journaled now is completed by whoever comes next."""
    last = service.stand_down(txn, event, confirmed, reason=reason, **more)
    service.tidy(confirmed)
    try:
        service.close_journal()
    except OSError as error:
        print(f"ddtree-host: journal: {error}", file=sys.stderr)
    return {"result": event, "generation": confirmed, "reason": reason, "end": last}


def restore(service: Service, pending: JSON, boot: bool) -> bool:
    """Put ``pending.from`` back and start it; True when it is proven healthy."""
    sup, before = service.sup, pending["from"]
    stop_s = float(pending.get("stop_timeout_s") or 60)
    if boot:
        form = Form() if before is None else sup.form_of(before)
        if sup.show()["state"] in ("active", "activating") and sup.members():
            sup.halt(stop_s)
        sup.place(form)
        if before is None:
            sup.ask_stop(0, block=False)  # the boot's own start job, made from the unit that is gone now
        elif form.links:
            sup.start(30, block=False)
        return False
    sup.halt(stop_s)  # first of all: what failed its proof serves no more, whatever comes
    sup.place(Form() if before is None else sup.form_of(before))
    if before is None:
        return True
    if pending.get("was") == "inactive":
        return False
    meta = service.meta(before)
    health, mark = meta.get("health"), sup.log_mark()
    sup.start(float((health or {}).get("timeout_s") or 120))
    if pending.get("was") == "failing":
        return False
    wait_healthy(service, before, health, Vigil(service, health, mark, service.secret_values(before)), lambda: None)
    return True


def downtime(entries: list[JSON], pending: JSON) -> float | None:
    """Seconds from the stop's begin to now; None when nothing ran or the clock is another boot's."""
    began = [entry["mono"] for entry in entries if (entry["step"], entry["event"]) == ("stop", "begin")]
    if not began or pending.get("boot") != boot_id() or pending.get("was") != "active":
        return None
    return round(time.monotonic() - float(began[0]), 3)


def keep_evidence(service: Service, pending: JSON, reason: str) -> list[str]:
    """The last log lines, the verdict and the GPUs' state into the failed generation; never stops a recovery."""
    txn, base = pending["txn"], service.generation(pending["to"])
    lines: list[str] = []
    try:
        known = service.secret_values(pending["to"])
        lines = [safe(line, known, 2000) for line in service.sup.log_tail(200)]
        if base.is_dir():
            place = make_dir(base / "evidence" / txn)
            write_file(place / "log.txt", "\n".join(lines).encode()[-LOG_CAP:] + b"\n", 0o640)
            verdict = read_bytes(service.txn_dir(txn) / "verdict.json", 8 << 20)
            if verdict is not None:
                write_file(place / "verdict.json", verdict)
            write_json(place / "why.json", {"reason": reason, "gpus": gpus()})
    except (OSError, HostError) as error:
        service.try_log(txn, "evidence", "fail", reason=as_error(error).message)
    else:
        service.try_log(txn, "evidence", "done", log=lines[-20:])
    return lines[-20:]


def by_hand(service: Service, pending: JSON) -> list[str]:
    """The commands for whoever has to mend it."""
    before, unit = pending["from"], service.unit_path
    commands = [" ".join([str(service.agent), "recover", "--root", str(service.root), "--service", service.name])]
    if isinstance(service.sup, Systemd):
        commands += [f"systemctl status {service.sup.unit}", f"journalctl -u {service.sup.unit} -n 100"]
        if before is not None:
            source = service.generation(before) / "unit"
            commands += [f"cp {source} {unit} && systemctl daemon-reload && systemctl restart {service.sup.unit}"]
    else:
        commands += [f"tail -n 100 {service.run / 'log'}"]
    return commands


# ---------------------------------------------------------------- apply


def check_plan(service: Service, plan: JSON) -> None:
    """Refuse a plan that is malformed, or that does not fit this host as it is now. Reads only."""
    named(TXN, plan.get("txn"), "txn")
    expect, health = member(plan, "expect", dict), member(plan, "health", (dict, type(None)), None)
    target = integer(plan.get("target"), "target")
    for key in ("stop_timeout_s", "gate_timeout_s", "lease_s"):
        number(plan.get(key), key, 0.1, 10**6)
    if health is not None:
        integer(health.get("port"), "health.port", 1, 65535)
        number(health.get("timeout_s"), "health.timeout_s", 0.1, 10**6)
        member(health, "expect", dict)
        for pattern in member(health, "fatal", list):
            re.compile(pattern)
    if plan.get("format") != 1:
        raise HostError("usage", f"plan format {plan.get('format')!r} is not known here")
    if plan.get("service") != service.name or plan.get("root") != str(service.root):
        raise HostError("usage", "the plan is of another service or root")
    if not service.agent.is_file():
        raise HostError("refused", "bin/ddtree-host is not installed; bootstrap first")
    state = service.state()
    if state["pending"] is not None:
        raise HostError("refused", f"deploy {state['pending']['txn']} is unfinished; recover it first")
    check_moved(service, expect, state)
    check_generation(service, plan, target)
    check_release(service, plan, target)
    check_surroundings(service, plan, health)


def check_moved(service: Service, expect: JSON, state: JSON) -> None:
    now, moved = service.sup.now(), []
    wanted = member(expect, "state", dict)
    if (wanted.get("confirmed"), wanted.get("pending")) != (state["confirmed"], state["pending"]):
        moved.append(f"state: confirmed {state['confirmed']}, expected {wanted.get('confirmed')}")
    found = digest(now.data) if now.kind == "file" else None
    if expect.get("unit_sha256") != found:
        moved.append(f"unit: sha256 {found}, expected {expect.get('unit_sha256')}")
    dropins = dropin_hashes(service)
    if member(expect, "dropins", dict) != dropins:
        moved.append(f"drop-ins: {sorted(dropins)}, expected {sorted(expect['dropins'])}")
    if expect.get("next_generation") != service.next_generation():
        moved.append(f"next generation: {service.next_generation()}, expected {expect.get('next_generation')}")
    if moved:
        raise HostError("moved", "the host moved since the plan was made: " + "; ".join(moved), moved=moved)


def check_generation(service: Service, plan: JSON, target: int) -> None:
    generation = member(plan, "generation", (dict, type(None)), None)
    if generation is None:
        service.meta(target)
        service.sup.form_of(target)
        return
    for name, text in member(generation, "files", dict).items():
        named(FILE, name, "generation file")
        if not isinstance(text, str) or len(text) > 8 << 20 or name == "generation.json":
            raise HostError("usage", f"generation file {name}: not a text, too long or a reserved name")
    member(generation, "meta", dict)
    first = service.next_generation()
    if plan.get("adopt") and service.adopt_generation() == first:
        first += 1
    if target != generation.get("n") or target != first:
        raise HostError("usage", f"generation {generation.get('n')} is not the next one, {first}")


def check_release(service: Service, plan: JSON, target: int) -> None:
    release = plan.get("release")
    if release is None and plan.get("generation") is None:
        release = service.meta(target).get("release")
    if release is not None and not installed(service.root, named(RELEASE, release, "release")):
        raise HostError("refused", f"release {release} is not installed")


def check_surroundings(service: Service, plan: JSON, health: JSON | None) -> None:
    """Drift without leave, things we cannot remove, a foreign process on the port."""
    drift = service.drift()
    if drift and not (plan.get("adopt") or plan.get("overwrite")):
        raise HostError("refused", "the host is not as it was left: " + "; ".join(drift), drift=drift)
    show = service.sup.show()
    if plan.get("adopt") and service.sup.now().masked:
        raise HostError("refused", "the unit is masked: there is nothing to adopt")
    if show["load"] == "masked" and not service.sup.now().masked:
        raise HostError("refused", f"the unit is masked elsewhere: systemctl unmask --runtime {service.name}")
    for path in show["dropin_paths"]:
        inner = Path(path).parent
        if inner.name == f"{service.name}.service.d" and inner != service.dropin_dir:
            raise HostError("refused", f"drop-in {path} is not in {service.unit_dir} and would stay; remove it first")
    if health is not None:
        owner = port_owner(int(health["port"]), service.sup.members())
        if owner is not None and not owner["ours"]:
            raise HostError("refused", f"port {health['port']} is taken by {owner['command']} (pid {owner['pid']})")


class Applier:
    """One transaction, from accept to its end. Holds the flock for its whole life; needs no client but the verdict."""

    def __init__(self, service: Service, plan: JSON) -> None:
        self.service, self.plan, self.sup = service, plan, service.sup
        self.txn: str = plan["txn"]
        self.dir = service.txn_dir(self.txn)
        self.terminated = False
        self.lease: bytes | None = None
        self.lease_at = time.monotonic()
        self.health: JSON | None = plan.get("health")
        load = float((self.health or {}).get("timeout_s") or 120)
        self.limit = float(plan["stop_timeout_s"]) + load + float(plan["gate_timeout_s"])
        self.deadline = time.monotonic() + self.limit
        self.vigil: Vigil | None = None
        self.downtime: float | None = None

    def run(self) -> int:
        """Walk the steps; on anything but confirm, recover. 0 confirmed, 1 not; the journal tells which end."""
        for ignored in (signal.SIGHUP, signal.SIGINT):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "terminated", True))
        try:
            with self.service.lock(self.txn, str(self.plan.get("who")), str(self.plan.get("client"))):
                self.service.sweep()
                return self._walk()
        except HostError as error:
            self._refuse(error)
            return 1

    def _walk(self) -> int:
        step = "accept"
        try:
            for step, act in STEPS:
                if (step == "adopt" and not self.plan.get("adopt")) or (step == "generation" and not self._new):
                    continue
                if step != "confirm":  # the verdict came in time
                    self.watch()
                self.service.log(self.txn, step, "begin", **(self._title() if step == "accept" else {}))
                self.service.log(self.txn, step, "done", **act(self))
            self.service.close_journal()
            return 0
        except Exception as error:  # also a bug in here must end in a recovery
            told = as_error(error)
            self.service.try_log(
                self.txn, step, "fail", kind=told.kind, reason=told.message, log=told.more.get("log", [])
            )
            state = self.service.state()
            mine = (state["pending"] or {}).get("txn") == self.txn or (state["last"] or {}).get("txn") == self.txn
            if mine:
                recover(self.service, f"{step}: {told.message}")
            else:
                self.service.tidy(state["confirmed"])
                self._refuse(told)
                self.service.try_log(self.txn, "end", "unchanged", generation=state["confirmed"], reason=told.message)
            return 1

    @property
    def _new(self) -> bool:
        return self.plan.get("generation") is not None

    def _title(self) -> JSON:
        keys = ("who", "client", "workspace_commit", "action", "target", "release")
        return {**{key: self.plan.get(key) for key in keys}, "from": self.service.state()["confirmed"]}

    def _refuse(self, error: HostError) -> None:
        write_json(self.dir / "refused.json", {"kind": error.kind, "message": error.message, **error.more})

    def watch(self) -> None:
        """Raise when we were told to stop, when the client's lease ran out, or at the hard deadline.

        The lease is a text that changes; its age is measured here by the monotonic clock, so that no jump of the
        wall clock ends it early.
        """
        if self.terminated:
            why = read_json(self.dir / "unlock.json") or {}
            raise HostError("failed", f"told to stop: {why.get('reason', 'SIGTERM')}")
        now, lease = time.monotonic(), read_bytes(self.dir / "lease", 256)
        if lease != self.lease:
            self.lease, self.lease_at = lease, now
        if now - self.lease_at > float(self.plan["lease_s"]):
            raise HostError("failed", f"the client was away for longer than its lease of {self.plan['lease_s']} s")
        if now > self.deadline:
            raise HostError("failed", f"no verdict within {self.limit:g} s (stop + load + gate)")

    # the steps, in the order of STEPS; each returns details for the journal

    def accept(self) -> JSON:
        """From here on the host knows of this transaction, and every way out of it ends in `stand_down`."""
        service, show = self.service, self.sup.show()
        check_plan(service, self.plan)
        write_json(service.dir / "service.json", {"supervisor": self.sup.name, "unit_dir": str(service.unit_dir)})
        service.hold_reserve()
        if self.sup.name == "systemd":
            make_dir(service.boot_link.parent)
            put_entry(service.boot_link, Form("link", os.fsencode(service.unit_dir / "ddtree-recover@.service")))
        failing = show["state"] == "failed" or show["sub"] == "auto-restart"
        was = (
            "failing" if failing else "active" if show["state"] in ("active", "activating", "reloading") else "inactive"
        )
        state = service.state()
        pending = {
            "txn": self.txn,
            "from": state["confirmed"],
            "to": self.plan["target"],
            "deadline": round(time.time() + self.limit, 3),
            "was": was,
            "boot": boot_id(),
            "stop_timeout_s": self.plan["stop_timeout_s"],
        }
        service.set_state(state["confirmed"], pending, state["last"])
        return {"was": was}

    def adopt(self) -> JSON:
        """Keep what is installed, byte for byte, as a generation of its own: what we come back to."""
        service, form, show = self.service, self.sup.now(), self.sup.show()
        n = service.adopt_generation()
        data = form.data if form.kind != "none" else read_bytes(Path(show["fragment"] or "/nonexistent")) or b""
        kept = {
            "kind": form.kind,
            "mode": form.mode,
            "uid": form.owner[0] if form.owner else 0,
            "gid": form.owner[1] if form.owner else 0,
            "dropins": sorted(form.dropins),
            "links": dict(form.links),
            "enabled": show["enabled"],
            "fragment": show["fragment"],
        }
        files = {"unit": data, **{f"dropins/{name}": text for name, text in form.dropins.items()}}
        meta = {"n": n, "txn": self.txn, "created": time.time(), "adopted": kept, "health": None, "release": None}
        service.write_generation(n, files, meta)
        state = service.state()
        service.set_state(n, {**state["pending"], "from": n}, state["last"])
        return {"generation": n, "fragment": show["fragment"]}

    def generation(self) -> JSON:
        given, n = self.plan["generation"], self.plan["target"]
        extra = {"n": n, "txn": self.txn, "release": self.plan.get("release"), "health": self.health}
        meta = {"created": time.time(), **given["meta"], **extra}
        files = {name: text.encode() for name, text in given["files"].items()}
        self.service.write_generation(n, files, meta)
        return {"generation": n}

    def verify_unit(self) -> JSON:
        return self.sup.verify(self.plan["target"])

    def stop(self) -> JSON:
        service = self.service
        old = self.sup.now()
        if self.plan.get("overwrite") and service.drift():
            keep = make_dir(self.dir / "overwritten", 0o700)
            for name, data in {service.unit_path.name: old.data, **old.dropins}.items():
                write_file(keep / name, data, 0o600)
        self.sup.halt(float(self.plan["stop_timeout_s"]))
        deadline = time.monotonic() + 10
        while self.health and (owner := port_owner(int(self.health["port"]), [])) is not None:
            if time.monotonic() > deadline:
                raise HostError(
                    "failed", f"port {self.health['port']} is still taken by {owner['command']} {owner['pid']}"
                )
            time.sleep(0.1)
        return {}

    def switch(self) -> JSON:
        self.sup.place(self.sup.form_of(self.plan["target"]))
        return {}

    def start(self) -> JSON:
        n = self.plan["target"]
        if self.service.meta(n).get("adopted"):
            self.health = None
        self.vigil = Vigil(self.service, self.health, self.sup.log_mark(), self.service.secret_values(n))
        self.sup.start(float((self.health or {}).get("timeout_s") or 120))
        return {}

    def wait_health(self) -> JSON:
        assert self.vigil is not None
        wait_healthy(self.service, self.plan["target"], self.health, self.vigil, self.watch)
        self.downtime = downtime(self.service.journal.entries(self.txn), self.service.state()["pending"])
        return {"downtime_s": self.downtime}

    def gate(self) -> JSON:
        """Wait for the verdict while the service is watched. One that is here counts before the lease."""
        assert self.vigil is not None
        while True:
            verdict = read_json(self.dir / "verdict.json")
            if verdict is not None:
                kind, reasons = verdict.get("kind"), verdict.get("reasons")
                if verdict.get("passed") is True:
                    return {"kind": kind}
                raise HostError("failed", f"the verdict is {kind}: {safe(json.dumps(reasons), cap=2000)}")
            self.watch()
            self.vigil.look()
            time.sleep(POLL_S)

    def confirm(self) -> JSON:
        n = self.plan["target"]
        write_json(self.service.generation(n) / "verdict.json", read_json(self.dir / "verdict.json"))
        self.service.stand_down(self.txn, "confirmed", n, reason="", downtime_s=self.downtime)
        self.service.tidy(n)
        with contextlib.suppress(OSError):  # display only
            write_link(self.service.dir / "current", f"generations/{n}")
        return {}


STEPS: tuple[tuple[str, Callable[[Applier], JSON]], ...] = (
    ("accept", Applier.accept),  # the plan fits; state.json says pending
    ("adopt", Applier.adopt),  # a foreign unit becomes a generation
    ("generation", Applier.generation),  # the new files are written, whole
    ("verify-unit", Applier.verify_unit),  # last step before anything stops
    ("stop", Applier.stop),  # from here on a failure restores
    ("switch", Applier.switch),
    ("start", Applier.start),
    ("health", Applier.wait_health),
    ("gate", Applier.gate),
    ("confirm", Applier.confirm),  # one fsynced rename
)


# ---------------------------------------------------------------- the process supervisor


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


# ---------------------------------------------------------------- releases


def installed(root: Path, release: str) -> bool:
    return read_json(root / "releases" / release / "installed.json") is not None


def blob_path(root: Path, sha: str) -> Path:
    return root / "store" / sha[:2] / sha


def hashes_of(request: JSON) -> list[str]:
    return [named(SHA256, sha, "hash") for sha in member(request, "hashes", list)]


def copy_hashed(source: IO[bytes], target: IO[bytes], size: int | None = None) -> tuple[str, int]:
    """Copy (at most ``size`` bytes) and return the sha256 and length of what was copied."""
    total, left, state = 0, size, hashlib.sha256()
    while chunk := source.read(1 << 20 if left is None else min(1 << 20, left)):
        state.update(chunk)
        target.write(chunk)
        total += len(chunk)
        left = None if left is None else left - len(chunk)
    return state.hexdigest(), total


def missing(service: Service, request: JSON) -> JSON:
    """Which of the hashes the store lacks."""
    return {"missing": [sha for sha in hashes_of(request) if not blob_path(service.root, sha).is_file()]}


def own_staging(path: Path, create: bool = False) -> int:
    """A descriptor of a staging directory that belongs to the SSH user and to nobody's symlink."""
    if create and not path.exists():
        path.mkdir(0o700, parents=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    owner, user = os.fstat(fd).st_uid, int(os.environ.get("SUDO_UID") or os.geteuid())
    if owner != user:
        os.close(fd)
        raise HostError("refused", f"{path} belongs to uid {owner}, not to {user}")
    return fd


def staged(_: Service, request: JSON) -> JSON:
    """Blobs that arrived whole in the staging directory."""
    path = absolute(request.get("staging"), "staging")
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return {"complete": [name for name in names if SHA256.fullmatch(name)]}


def receive(staging: Path, stream: IO[bytes]) -> JSON:
    """Unpack a gz tar stream of blobs named by their sha256; each is checked before it gets its name."""
    import tarfile  # only this verb

    fd, count, total = own_staging(staging, create=True), 0, 0
    try:
        for stale in staging.glob("*.part"):
            stale.unlink()
        with tarfile.open(fileobj=stream, mode="r|gz") as archive:
            for entry in archive:
                sha, part = named(SHA256, entry.name, "tar member"), f"{entry.name}.part"
                source = archive.extractfile(entry) if entry.isreg() else None
                if source is None:
                    raise HostError("refused", f"tar member {sha} is not a regular file")
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with os.fdopen(os.open(part, flags, 0o600, dir_fd=fd), "wb") as target:
                    got, size = copy_hashed(source, target, entry.size)
                if got != sha:
                    os.unlink(part, dir_fd=fd)
                    raise HostError("refused", f"blob {sha} arrived with sha256 {got}")
                os.rename(part, sha, src_dir_fd=fd, dst_dir_fd=fd)
                count, total = count + 1, total + size
    except (tarfile.TarError, EOFError) as error:
        raise HostError("failed", f"the stream was cut or damaged: {error}", received=count) from error
    finally:
        os.close(fd)
    return {"received": count, "bytes": total}


def ingest(service: Service, request: JSON) -> JSON:
    """Copy blobs from staging into the store; what is hashed is the copy, which nobody but root can touch."""
    path, root = absolute(request.get("staging"), "staging"), service.root
    fd, temps, done = own_staging(path), {}, []
    owner = os.fstat(fd).st_uid
    store = make_dir(root / "store", 0o700)
    try:
        for sha in hashes_of(request):
            if blob_path(root, sha).is_file():
                done.append(sha)
                continue
            try:
                inner = os.open(sha, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
            except OSError as error:
                raise HostError("refused", f"blob {sha}: {error.strerror}") from error
            with os.fdopen(inner, "rb") as source:
                status = os.fstat(inner)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
                    raise HostError("refused", f"blob {sha} is not a regular file of uid {owner}")
                temp = store / f".{sha}.{secrets.token_hex(4)}.tmp"
                temps[sha] = temp
                with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
                    got, _ = copy_hashed(source, target)
            if got != sha:
                raise HostError("refused", f"blob {sha} has sha256 {got}")
        sync_filesystem(store)
        for sha, temp in temps.items():
            make_dir(blob_path(root, sha).parent, 0o700)
            temp.rename(blob_path(root, sha))
            done.append(sha)
        sync_filesystem(store)
        for sha in done:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(sha, dir_fd=fd)
    finally:
        os.close(fd)
        for temp in temps.values():
            temp.unlink(missing_ok=True)
    return {"ingested": len(temps)}


def release_path(path: Any, python: str) -> str:
    """Where a manifest's file goes below the release; usage error for anything but a plain path of ours."""
    parts = path.split("/") if isinstance(path, str) else []
    plain = all(part not in ("", ".", "..") and part.isprintable() and len(part) < 255 for part in parts)
    if plain and path.startswith((f"venv/lib/python{python}/site-packages/", "share/")):
        return str(path)
    raise HostError("usage", f"manifest path {path!r} is neither below site-packages/ nor below share/")


def fitting_python(requires: JSON) -> str:
    """The host's interpreter of the version the release was built for; refused when the host does not fit."""
    version = named(re.compile(r"3\.\d{1,2}"), requires.get("python"), "requires.python")
    if requires.get("machine") not in (None, platform.machine()):
        raise HostError("refused", f"the release is for {requires.get('machine')}, this is {platform.machine()}")
    have, want = glibc(), requires.get("glibc")
    if want is not None and [int(n) for n in have.split(".")] < [int(n) for n in str(want).split(".")]:
        raise HostError("refused", f"the release needs glibc {want}, this host has {have or 'another libc'}")
    question = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in (sys.executable, f"/usr/bin/python{version}", "/usr/bin/python3", f"/usr/local/bin/python{version}"):
        if run([path, "-I", "-c", question]).stdout.strip() == version:
            return path
    raise HostError("refused", f"the release needs Python {version}; install it (this is {platform.python_version()})")


def install(service: Service, request: JSON) -> JSON:
    """Build ``releases/<id>`` from the store, or not at all. Refuses before the first write what cannot work here."""
    manifest = member(request, "manifest", dict)
    release = named(RELEASE, manifest.get("id"), "release")
    root, requires = service.root, member(manifest, "requires", dict)
    if installed(root, release):
        return {"installed": release, "already": True}
    if manifest.get("format") != 1:
        raise HostError("usage", f"manifest format {manifest.get('format')!r} is not known here")
    smoke = member(manifest, "smoke", list)
    for line in smoke:
        named(re.compile(r"import [A-Za-z_][A-Za-z0-9_.]*"), line, "smoke")
    python = fitting_python(requires)
    files = {}
    for entry in member(manifest, "files", list):
        sha, path = named(SHA256, entry.get("sha256"), "sha256"), release_path(entry.get("path"), requires["python"])
        if path in files or not blob_path(root, sha).is_file():
            raise HostError("refused", f"{path} is named twice" if path in files else f"blob {sha} is not in the store")
        files[path] = (sha, 0o755 if integer(entry.get("mode", 0o644), "mode", 0, 0o7777) & 0o111 else 0o644)
    need = sum(blob_path(root, sha).stat().st_size for sha, _ in files.values()) * 5 // 4 + (32 << 20)
    free = shutil.disk_usage(root).free
    if free < need:
        raise HostError("disk-full", f"the release needs {need >> 20} MiB, {free >> 20} MiB are free below {root}")
    base = make_dir(root / "releases")
    with (base / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in base.glob("*.tmp-*"):
            erase(stale)
        if installed(root, release):
            return {"installed": release, "already": True}
        temp = base / f"{release}.tmp-{secrets.token_hex(4)}"
        try:
            build_release(root, temp, base / release, python, requires["python"], manifest, files, smoke)
            temp.rename(base / release)
            fsync_dir(base)
        except BaseException:
            erase(temp)
            raise
    return {"installed": release, "already": False, "files": len(files)}


def build_release(
    root: Path,
    temp: Path,
    final: Path,
    python: str,
    version: str,
    manifest: JSON,
    files: dict[str, Any],
    smoke: list[str],
) -> None:
    """Fill ``temp``: venv, files, byte code, smoke import, manifest, installed.json last; then read-only and synced."""
    temp.mkdir(0o755)
    done = run([python, "-I", "-m", "venv", "--without-pip", str(temp / "venv")], timeout=120)
    if done.returncode != 0:
        raise HostError("failed", f"python -m venv: {safe(done.stderr[-2000:])}")
    packages = temp / "venv" / "lib" / f"python{version}" / "site-packages"
    for path, (sha, mode) in files.items():
        target = temp / path
        target.parent.mkdir(0o755, parents=True, exist_ok=True)
        copy_blob(blob_path(root, sha), target, sha, mode)
    own = str(temp / "venv" / "bin" / "python")
    compiling = ["-q", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(temp), "-p", str(final)]
    done = run([python, "-I", "-m", "compileall", *compiling, str(packages)], timeout=1200)
    if "No space left" in done.stdout + done.stderr:
        raise HostError("disk-full", "no space left while compiling the release")
    if smoke:
        more: JSON = {}
        group = service_group()
        if group is not None:  # proves that the service user can read it, and runs no shipped code as root
            more = {"user": USER, "group": group, "extra_groups": []}
        done = run([own, "-I", "-B", "-c", "\n".join(smoke)], timeout=600, **more)
        if done.returncode != 0:
            raise HostError("failed", f"the release cannot be imported: {safe(done.stderr[-2000:])}")
    write_json(temp / "manifest.json", manifest)
    told = {"id": final.name, "installed": time.time(), "python": platform.python_version(), "files": len(files)}
    write_json(temp / "installed.json", told)
    for directory, _, names in os.walk(temp):
        for name in names:
            inner = Path(directory) / name
            if not inner.is_symlink():
                inner.chmod(stat.S_IMODE(inner.stat().st_mode) & ~0o222)
        if directory != str(temp):
            Path(directory).chmod(0o555)
    sync_filesystem(temp)


def copy_blob(source: Path, target: Path, sha: str, mode: int) -> None:
    """Reflink where the filesystem can, else copy; never a hard link, one write would corrupt every release."""
    ficlone = 0x40049409
    with source.open("rb") as blob, target.open("xb+") as file:
        try:
            fcntl.ioctl(file.fileno(), ficlone, blob.fileno())
            got = copy_hashed(file, _Nowhere())[0]  # type: ignore[arg-type]
        except OSError:
            got = copy_hashed(blob, file)[0]
        os.fchmod(file.fileno(), mode)
    if got != sha:
        raise HostError("failed", f"blob {sha} is damaged in the store; remove {source} and ship it again")


class _Nowhere:
    def write(self, _: bytes) -> None:
        """Drop it."""


def erase(tree: Path) -> None:
    """Remove a tree whose directories may be read-only."""
    for directory, _, _ in os.walk(tree):
        Path(directory).chmod(0o755)
    shutil.rmtree(tree, ignore_errors=True)


# ---------------------------------------------------------------- what a host says of itself


def system_facts() -> JSON:
    version = run(["systemctl", "--version"]).stdout.split("\n")[0].split()
    return {
        "hostname": platform.node(),
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "uid": os.geteuid(),
        "python": platform.python_version(),
        "glibc": glibc(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "systemd": version[1] if len(version) > 1 else None,
        "time": time.time(),
        "pid1": (read_bytes(Path("/proc/1/comm")) or b"").decode(errors="replace").strip(),
    }


def dropin_hashes(service: Service) -> dict[str, str]:
    """{path: sha256} of every drop-in systemd applies, and of those in unit_dir it has not loaded yet."""
    paths = {*service.sup.show()["dropin_paths"], *map(str, service.dropin_dir.glob("*.conf"))}
    if service.sup.name == "process":
        return {}
    found = {path: digest(read_bytes(Path(path))) for path in sorted(paths)}
    return {path: sha for path, sha in found.items() if sha is not None}


def unit_facts(service: Service, show: JSON) -> JSON:
    form = service.sup.now()
    known = service.secret_values(service.state()["confirmed"])
    dropins = dropin_hashes(service)
    texts = {path: safe((read_bytes(Path(path)) or b"").decode(errors="replace"), known) for path in dropins}
    shown = form.data if form.kind == "file" else read_bytes(Path(show["fragment"])) if show["fragment"] else None
    return {
        "path": str(service.unit_path),
        "kind": form.kind,
        "sha256": digest(form.data) if form.kind == "file" else None,
        "text": None if shown is None else safe(shown.decode(errors="replace"), known),
        "dropins": dropins,
        "dropin_texts": texts,
        "links": dict(form.links),
        "enabled": show["enabled"],
        "masked": form.masked or show["load"] == "masked",
        "fragment": show["fragment"],
    }


def generation_facts(service: Service, n: int | None) -> JSON | None:
    if n is None:
        return None
    base = service.generation(n)
    found = {path.name: digest(read_bytes(path, 8 << 20)) for path in sorted(base.iterdir()) if path.is_file()}
    return {"n": n, "meta": service.meta(n), "files": {name: sha for name, sha in found.items() if sha is not None}}


def journal_tail(service: Service, limit: int = 20) -> list[JSON]:
    entries = service.journal.entries()[-limit:]
    return [safe_json(entry) for entry in entries if len(json.dumps(entry)) < LOG_CAP]


def identity(path: Path) -> JSON:
    """What identifies weights without reading them: the config, the tensors' headers, the shards' sizes."""
    shards, headers = [], hashlib.sha256()
    for shard in sorted(path.glob("*.safetensors")):
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            headers.update(shard.name.encode() + file.read(min(length, 64 << 20)))
        shards.append([shard.name, shard.stat().st_size])
    return {
        "config_sha256": digest(read_bytes(path / "config.json", 8 << 20)),
        "headers_sha256": headers.hexdigest(),
        "shards": shards,
    }


def models_facts(paths: list[Any]) -> JSON:
    found = {}
    for given in paths[:16]:
        path = absolute(given, "model_paths")
        found[given] = {"present": path.is_dir(), "identity": identity(path) if path.is_dir() else None}
    return found


ARGUMENTS = frozenset(
    """model_path tokenizer_path served_model_name dtype quantization kv_cache_dtype context_length mem_fraction_static
    max_running_requests max_total_tokens max_total_num_tokens chunked_prefill_size max_prefill_tokens schedule_policy
    page_size tp_size pp_size dp_size ep_size nnodes device load_format host port random_seed version
    attention_backend prefill_attention_backend decode_attention_backend sampling_backend grammar_backend
    moe_runner_backend moe_a2a_backend mm_attention_backend speculative_algorithm speculative_draft_model_path
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens speculative_ddtree_budget
    speculative_ddtree_topk speculative_dflash_block_size speculative_attention_mode disable_cuda_graph
    cuda_graph_bs cuda_graph_max_bs disable_radix_cache disable_overlap_schedule disable_custom_all_reduce
    enable_nccl_nvls enable_torch_compile enable_deterministic_inference enable_metrics skip_tokenizer_init
    trust_remote_code reasoning_parser tool_call_parser stream_interval watchdog_timeout numa_node engine block_size
    avg_spec_accept_length""".split()  # noqa: SIM905
)


def arguments(service: Service, port: int, n: int | None, timeout: float = 2) -> JSON | None:
    """The running server's resolved arguments, by allow-list, secrets removed by value; None when it does not tell."""
    try:
        info = server_info(port, service.api_key(n), timeout)
    except HostError:
        return None
    inner = info.get("internal_states")
    if isinstance(inner, list) and inner and isinstance(inner[0], dict):
        info = {**info, "avg_spec_accept_length": inner[0].get("avg_spec_accept_length")}
    known, kept = service.secret_values(n), {}
    for key in sorted(ARGUMENTS & set(info)):
        text = json.dumps(info[key])
        kept[key] = info[key] if len(text) < 4096 and safe(text, known) == text else REDACTED
    return kept


def gpus() -> list[JSON]:
    """Name, driver and memory of each GPU as nvidia-smi tells; empty where there is none."""
    done = run(
        ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader"], 20
    )
    keys = ("index", "name", "driver_version", "memory_total", "memory_used")
    rows = [safe(line).split(", ") for line in done.stdout.splitlines()[:64]] if done.returncode == 0 else []
    return [dict(zip(keys, row)) for row in rows if len(row) == len(keys)]  # noqa: B905 (strict= is 3.10)


def status(service: Service, request: JSON) -> JSON:
    """What runs, what is confirmed, what is unfinished, who holds the lock. Writes nothing, works without root."""
    state, show = service.state(), service.sup.show()
    confirmed = state["confirmed"]
    generation = None
    with contextlib.suppress(HostError):
        generation = generation_facts(service, confirmed)
    port = (((generation or {}).get("meta") or {}).get("health") or {}).get("port") or request.get("port")
    port = integer(request.get("port", port), "port", 1, 65535) if port is not None else None
    active = show["state"] == "active"
    verdict = None if confirmed is None else read_json(service.generation(confirmed) / "verdict.json")
    return {
        "state": {"confirmed": confirmed, "pending": state["pending"]},
        "journal_tail": journal_tail(service),
        "unfinished": (state["pending"] or {}).get("txn"),
        "lock": service.holder(),
        "generation": generation,
        "active": {key: show[key] for key in ("state", "sub", "pid", "since_unix", "restarts", "result")},
        "port_owner": port_owner(port, service.sup.members()) if port is not None else None,
        "verdict": verdict,
        "server_info": arguments(service, port, confirmed) if active and port is not None else None,
    }


def probe(service: Service, request: JSON) -> JSON:
    """All a plan needs, in one reply. Writes nothing, works without root with less detail."""
    release = request.get("release")
    root = service.root
    there = next(path for path in (root, *root.parents) if path.exists())
    return {
        "system": system_facts(),
        "agent_sha256": digest(read_bytes(service.agent, 8 << 20)),
        "disk_free": shutil.disk_usage(there).free,
        "release_installed": release is not None and installed(root, named(RELEASE, release, "release")),
        **status(service, request),
        "next_generation": service.next_generation(),
        "adopt_generation": service.adopt_generation(),
        "drift": service.drift(),
        "unit": unit_facts(service, service.sup.show()),
        "models": models_facts(member(request, "model_paths", list, [])),
    }


def collect(service: Service, request: JSON) -> JSON:
    """What a snapshot keeps: texts with secrets removed, and the resolved arguments by allow-list."""
    state, show = service.state(), service.sup.show()
    n = state["confirmed"]
    known, base = service.secret_values(n), service.generation(n or 0)
    lines = (read_bytes(base / "env") or b"").decode(errors="replace").splitlines() if n is not None else []
    hidden = [
        f"{key}={REDACTED}" if SECRET_NAME.search(key) else f"{key}{eq}{value}"
        for key, eq, value in (line.partition("=") for line in lines)
    ]
    meta = service.meta(n) if n is not None else None
    manifest = None
    if meta and meta.get("release"):
        found = read_json(
            service.root / "releases" / named(RELEASE, meta["release"], "release") / "manifest.json", 256 << 20
        )
        if found is not None:
            manifest = {
                **{key: value for key, value in found.items() if key != "files"},
                "files": len(found.get("files", [])),
            }
    port = ((meta or {}).get("health") or {}).get("port") or request.get("port")
    unit, cards = unit_facts(service, show), gpus()
    told = arguments(service, integer(port, "port", 1, 65535), n, 5) if port and show["state"] == "active" else None
    return {
        "unit": unit,
        "dropins": unit["dropin_texts"],
        "env": safe("\n".join(hidden), known) if hidden else None,
        "state": {"confirmed": n, "pending": state["pending"]},
        "generation": generation_facts(service, n),
        "manifest": manifest,
        "server_info": told,
        "gpus": cards,
        "driver": cards[0]["driver_version"] if cards else None,
        "verdict": read_json(base / "verdict.json") if n is not None else None,
        "system": system_facts(),
    }


def history(service: Service, request: JSON) -> JSON:
    """Transactions, newest first, and all generations, each with whether it was ever confirmed."""
    limit = integer(request.get("limit", 50), "limit", 1, 1000)
    found: dict[str, JSON] = {}
    for entry in service.journal.entries():
        txn = str(entry.get("txn"))
        row = found.setdefault(txn, {"txn": txn, "t": entry.get("t"), "end": None})
        if (entry.get("step"), entry.get("event")) == ("accept", "begin"):
            row.update({key: entry.get(key) for key in ("who", "client", "action", "from", "target", "release")})
        elif entry.get("step") == "end":
            row.update(
                end=entry.get("event"), **{key: entry.get(key) for key in ("generation", "reason", "downtime_s")}
            )
        elif entry.get("event") == "note":
            row.update(note=entry.get("step"), reason=entry.get("reason"))
    confirmed = {row.get("generation") for row in found.values() if row["end"] == "confirmed"}
    generations = []
    for n in service.generations():
        meta = read_json(service.generation(n) / "generation.json") or {}
        row = {key: meta.get(key) for key in ("created", "release", "txn", "who", "workspace_commit")}
        adopted = meta.get("adopted") is not None
        generations.append({"n": n, "confirmed": n in confirmed or adopted, "adopted": adopted, **row})
    return {"history": list(found.values())[::-1][:limit], "generations": generations}


def generation(service: Service, request: JSON) -> JSON:
    """One generation: its meta and its texts, without the environment's secrets."""
    n = integer(request.get("n"), "n")
    meta, base, known = service.meta(n), service.generation(n), service.secret_values(n)
    texts = {
        path.name: read_bytes(path) or b""
        for path in base.iterdir()
        if path.is_file() and path.name != "generation.json"
    }
    return {
        "n": n,
        "meta": meta,
        "files": {name: safe(text.decode(errors="replace"), known) for name, text in texts.items()},
    }


def logs(service: Service, request: JSON) -> JSON:
    lines = service.sup.log_tail(integer(request.get("lines", 100), "lines", 1, 5000))
    known = service.secret_values(service.state()["confirmed"])
    return {"lines": safe("\n".join(lines)[-4 * TEXT_CAP :], known, 4 * TEXT_CAP).splitlines()}


# ---------------------------------------------------------------- verbs that change something


RECOVER_UNIT = """\
[Unit]
Description=Finish or undo an interrupted deploy of %i before it starts (ddtree)
RequiresMountsFor={root}
Before=%i.service
ConditionPathExists={root}/services/%i/state.json

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={python} -I {root}/bin/ddtree-host recover --boot --root {root} --service %i
TimeoutStartSec=300

[Install]
WantedBy=multi-user.target
"""


def bootstrap(service: Service, request: JSON) -> JSON:
    """Write bin/ddtree-host, the directories, and as root under systemd the user and the boot one-shot."""
    source = base64.b64decode(member(request, "source_b64", str), validate=True)
    compile(source, "ddtree-host", "exec")
    changed = []
    root = service.root
    for path, mode in (
        (root / "bin", 0o755),
        (root / "releases", 0o755),
        (root / "services", 0o755),
        (root / "store", 0o700),
    ):
        make_dir(path, mode)
    if service.sup.name == "systemd" and os.geteuid() == 0:
        try:
            pwd.getpwnam(USER)
        except KeyError:
            shell = next((path for path in ("/usr/sbin/nologin", "/sbin/nologin") if Path(path).exists()), "/bin/false")
            done = run(["useradd", "--system", "--user-group", "--no-create-home", "--shell", shell, USER])
            if done.returncode != 0:
                raise HostError("failed", f"useradd: {safe(done.stderr.strip())}") from None
            changed.append("user")
        text = RECOVER_UNIT.format(root=root, python=sys.executable).encode()
        unit = service.unit_dir / "ddtree-recover@.service"
        if read_bytes(unit) != text:
            write_file(unit, text)
            run(["systemctl", "daemon-reload"], 90)
            changed.append(unit.name)
    if read_bytes(service.agent, 8 << 20) != source:
        write_file(service.agent, source, 0o755)
        changed.append("bin/ddtree-host")
    return {"changed": changed, "agent_sha256": digest(source)}


def apply(service: Service, request: JSON) -> JSON:
    """Check the sealed plan, start the applier detached, answer once it holds the lock and accepted the plan."""
    plan = member(request, "plan", dict)
    txn = named(TXN, plan.get("txn"), "txn")
    holder = service.holder()
    if holder and holder["alive"]:
        raise HostError(
            "locked", f"{service.name} is locked by {safe(str(holder['who']))} (txn {holder['txn']})", lock=holder
        )
    if service.dir.is_dir():
        service.close_journal()
    check_plan(service, plan)
    if plan.get("supervisor") != service.sup.name or plan.get("unit_dir") not in (None, str(service.unit_dir)):
        raise HostError("usage", "the plan is of another supervisor or unit_dir")
    directory = service.txn_dir(txn)
    if directory.exists():
        raise HostError("refused", f"transaction {txn} exists already")
    make_dir(directory, 0o700)
    write_json(directory / "plan.json", plan, 0o600)
    argv = [
        *service.agent_argv("run"),
        "--txn",
        txn,
        "--supervisor",
        service.sup.name,
        "--unit-dir",
        str(service.unit_dir),
    ]
    load = float((plan.get("health") or {}).get("timeout_s") or 120)
    service.sup.spawn(argv, txn, stop_s=float(plan["stop_timeout_s"]) + load + 120)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        refused = read_json(directory / "refused.json")
        if refused is not None:
            raise HostError(refused["kind"], refused["message"])
        if any(e.get("step") == "accept" and e.get("event") == "done" for e in service.journal.entries(txn)):
            return {"txn": txn}
        time.sleep(0.05)
    raise HostError("failed", "the applier did not start; nothing was changed by it so far (see history)")


def verdict(service: Service, request: JSON) -> JSON:
    """Leave the client's verdict for the applier; the first one counts. Whether it came in time, the journal says."""
    txn, given = named(TXN, request.get("txn"), "txn"), member(request, "verdict", dict)
    if not isinstance(given.get("passed"), bool):
        raise HostError("usage", "verdict.passed is neither true nor false")
    if (service.state()["pending"] or {}).get("txn") != txn:
        raise HostError("refused", f"transaction {txn} is not in progress")
    directory = service.txn_dir(txn)
    temp = directory / f".verdict.{secrets.token_hex(4)}"
    write_json(temp, given)
    try:
        os.link(temp, directory / "verdict.json")
    except FileExistsError:
        raise HostError("refused", f"transaction {txn} has its verdict already") from None
    finally:
        temp.unlink()
    fsync_dir(directory)
    return {"txn": txn}


def recover_verb(service: Service, request: JSON) -> JSON:
    """`recover`, for the client and the command line. Survives the client: SIGHUP and SIGTERM are ignored."""
    reason, boot = safe(member(request, "reason", str, "asked for"), cap=500), member(request, "boot", bool, False)
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    if not service.dir.is_dir():
        return {"result": "nothing", "generation": None}
    with service.lock(f"recover-{os.getpid()}", str(request.get("who", "")), str(request.get("client", ""))):
        return recover(service, reason, boot)


def power(service: Service, request: JSON) -> JSON:
    """stop, start, restart by an operator: under the lock, journaled."""
    verb, state = request["verb"], service.state()
    if state["confirmed"] is None:
        raise HostError("refused", f"{service.name} was never deployed here")
    who, client = safe(str(request.get("who", "")), cap=100), safe(str(request.get("client", "")), cap=100)
    timeout = number(request.get("timeout_s", 60), "timeout_s", 1, 3600)
    txn = f"{verb}-{int(time.time())}-{secrets.token_hex(2)}"
    with service.lock(txn, who, client):
        if service.state()["pending"] is not None:
            raise HostError("refused", "a deploy is unfinished; recover it first")
        if verb in ("stop", "restart"):
            service.sup.halt(timeout)
        if verb in ("start", "restart"):
            service.sup.start(timeout)
        service.log(txn, verb, "note", who=who, client=client, reason=safe(str(request.get("reason", "")), cap=500))
    show = service.sup.show()
    return {"active": {key: show[key] for key in ("state", "sub", "pid", "since_unix", "restarts", "result")}}


def unlock(service: Service, request: JSON) -> JSON:
    """Tell a live applier to stop: it recovers and ends. ``released``: whether it did so within ``wait_s``."""
    reason, holder = safe(member(request, "reason", str), cap=500), service.holder()
    if holder is None or not holder["alive"]:
        return {"released": True, "was": None, "unfinished": (service.state()["pending"] or {}).get("txn")}
    pid, txn = holder.get("pid"), holder.get("txn")
    if not isinstance(pid, int) or start_ticks(pid) != holder.get("start"):
        raise HostError(
            "failed",
            "the lock is held by a process that did not say who it is; see: fuser -v " + str(service.dir / "lock"),
        )
    if TXN.fullmatch(str(txn)) and service.txn_dir(str(txn)).is_dir():
        with contextlib.suppress(OSError):  # on a full disk the applier ends without the reason
            write_json(service.txn_dir(str(txn)) / "unlock.json", {"reason": f"unlocked: {reason}"})
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + number(request.get("wait_s", 30), "wait_s", 0, 3600)
    while (now := service.holder()) and now["alive"] and now.get("pid") == pid and time.monotonic() < deadline:
        time.sleep(0.2)
    still = bool(now and now["alive"] and now.get("pid") == pid)
    return {"released": not still, "was": holder, "unfinished": (service.state()["pending"] or {}).get("txn")}


def follow(service: Service, txn: str, offset: int) -> int:
    """Print the transaction's journal lines from the ``offset``-th on, as they come, up to a terminal one.

    A byte on stdin renews the lease. When the applier is gone without an end, a last line says so ("gone") and the
    status is 3: `recover` is what comes next.
    """
    lease, seen, beats, lonely = service.txn_dir(txn) / "lease", offset, 0, 0.0
    listen = True
    while True:
        entries = service.journal.entries(txn)
        for entry in entries[seen:]:
            print(json.dumps(entry), flush=True)
        seen = max(seen, len(entries))
        if entries and entries[-1].get("step") == "end":
            return 0
        holder = service.holder()
        lonely = 0.0 if holder and holder["alive"] else lonely or time.monotonic()
        if lonely and time.monotonic() - lonely > 5:
            print(json.dumps({"t": time.time(), "txn": txn, "step": "follow", "event": "gone"}), flush=True)
            return 3
        if not listen:
            time.sleep(0.2)
        elif select.select([0], [], [], 0.2)[0]:
            listen = bool(os.read(0, 4096))
            if listen:
                beats += 1
                lease.write_text(f"{os.getpid()}-{beats}\n")


# ---------------------------------------------------------------- entry

VERBS: dict[str, Callable[[Service, JSON], JSON]] = {
    "probe": probe, "status": status, "history": history, "generation": generation, "logs": logs, "collect": collect,
    "bootstrap": bootstrap, "missing": missing, "staged": staged, "ingest": ingest, "install": install,
    "apply": apply, "verdict": verdict, "recover": recover_verb, "unlock": unlock,
    "stop": power, "start": power, "restart": power,
}  # fmt: skip


def answer(act: Callable[[], JSON]) -> int:
    """Run it and print its reply, or its error, as the one JSON document. Exit status 0 when a reply was written."""
    os.umask(0o022)
    try:
        reply = {"ok": True, **act()}
    except Exception as error:  # the client gets a kind and a message, never a traceback
        told = as_error(error)
        reply = {"ok": False, "error": {"kind": told.kind, "message": safe(told.message), "hint": "", **told.more}}
    print(json.dumps(reply))
    return 0


def main_request(text: str) -> int:
    """One request by stdin; see the module's head."""

    def act() -> JSON:
        request = json.loads(text)
        if not isinstance(request, dict) or request.get("verb") not in VERBS:
            raise HostError("usage", "not a request with a verb known here")
        root, unit_dir = absolute(request.get("root"), "root"), absolute(request.get("unit_dir"), "unit_dir")
        service = Service(root, request.get("service", ""), str(request.get("supervisor")), unit_dir)
        return VERBS[request["verb"]](service, request)

    return answer(act)


def main(argv: list[str]) -> int:
    """The installed command: run, follow, supervise, receive, recover, status, history, logs."""
    parser = argparse.ArgumentParser(
        prog="ddtree-host", description="The host's half of ddtree-ops.", allow_abbrev=False
    )
    parser.add_argument(
        "verb", choices=("run", "follow", "supervise", "receive", "recover", "status", "history", "logs")
    )
    parser.add_argument("--root", default="/opt/ddtree")
    parser.add_argument("--service")
    parser.add_argument("--txn")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--staging")
    parser.add_argument("--supervisor")
    parser.add_argument("--unit-dir")
    parser.add_argument("--reason", default="asked for on the host")
    parser.add_argument("--boot", action="store_true")
    given = parser.parse_args(argv)
    os.umask(0o022)
    if given.verb == "receive":
        return answer(lambda: receive(absolute(given.staging, "staging"), sys.stdin.buffer))
    root = absolute(given.root, "root")

    def service() -> Service:
        if given.supervisor:
            return Service(root, given.service, given.supervisor, absolute(given.unit_dir, "unit_dir"))
        return Service.at(root, named(NAME, given.service, "service"))

    if given.verb == "run":
        return Applier(service(), service().plan(given.txn)).run()
    if given.verb == "follow":
        return follow(service(), given.txn, given.offset)
    if given.verb == "supervise":
        return supervise(service())
    if given.verb == "recover":
        return recover_command(service, given.reason, given.boot)
    return answer(lambda: VERBS[given.verb](service(), {"verb": given.verb}))


def recover_command(service: Callable[[], Service], reason: str, boot: bool) -> int:
    """`recover` at boot, after an applier's death and by hand: status 0 unless it is stuck.

    At boot and after an applier a held lock means that somebody is at it: nothing to do for us.
    """
    try:
        reply = recover_verb(service(), {"reason": "the host restarted" if boot else reason, "boot": boot})
    except HostError as error:
        print(json.dumps({"ok": False, "error": {"kind": error.kind, "message": error.message, **error.more}}))
        return 0 if error.kind == "locked" and boot else 1
    print(json.dumps({"ok": True, **reply}))
    return 0


if __name__ == "__main__" and sys.argv[0] != "-":
    raise SystemExit(main(sys.argv[1:]))
