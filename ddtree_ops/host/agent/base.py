"""Errors, the forms of what may be named, durable files, texts that may leave the host."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, AnyStr, TypeAlias

JSON: TypeAlias = "dict[str, Any]"


class Pattern:
    """A pattern that is compiled when it is first used: a question uses a few of them all."""

    def __init__(self, text: str | bytes) -> None:
        self.text = text

    def __getattr__(self, name: str) -> Any:
        value = getattr(re.compile(self.text), name)
        setattr(self, name, value)  # so it is not looked for again
        return value


def pattern(text: AnyStr) -> re.Pattern[AnyStr]:
    """What ``re.compile(text)`` gives, later."""
    return Pattern(text)  # type: ignore[return-value]


USER = "ddtree"
NAME = pattern(r"[a-z0-9][a-z0-9-]{0,40}")
TXN = pattern(r"[A-Za-z0-9][A-Za-z0-9_-]{3,63}")
RELEASE = pattern(r"[0-9a-f]{16,64}")
SHA256 = pattern(r"[0-9a-f]{64}")
FILE = pattern(r"[a-z][a-z0-9._-]{0,63}")
DROPIN = pattern(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,200}\.conf")
ROOT = pattern(r"(/[A-Za-z0-9_+=@,~-][A-Za-z0-9._+=@,~-]*|/\.[A-Za-z0-9_+=@,~-][A-Za-z0-9._+=@,~-]*)+")
TEXT_CAP = 256 * 1024
LOG_CAP = 64 * 1024
RESERVE = 256 * 1024
GO = "go"
POLL_S = 0.3
CRASH_LOOP = 3  # restarts during one wait after which a service is said to loop
SETTLE_S = 2.0  # without health facts, active for so long counts as healthy


class HostError(Exception):
    """What the client is told. Kinds: usage, moved, locked, disk-full, refused, failed, stuck, cut."""

    def __init__(self, kind: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.kind, self.message, self.more = kind, message, more


def as_error(error: BaseException) -> HostError:
    """Any exception as the error the client gets; a full disk is told as such."""
    if isinstance(error, HostError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HostError("disk-full", f"no space left: {error.filename or error}")
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return HostError("refused", f"read-only file system: {error.filename or error}")
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
    temp = path.parent / f".{path.name}.{os.urandom(4).hex()}.tmp"
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
    temp = path.parent / f".{path.name}.{os.urandom(4).hex()}.tmp"
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
        try:
            return file.read(cap)
        except ProcessLookupError:  # below /proc, of a process that ended meanwhile
            return None


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


PLAIN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "SYSTEMD_COLORS": "0"}


def run(argv: list[str], timeout: float = 30, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a host's program without a shell; rc 124 when it ran too long, 127 when it is absent."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": PLAIN, "errors": "replace", "cwd": "/", **more}
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False, **options)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"{argv[0]} did not end within {timeout:g} s")
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


ANSI = pattern(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")
CONTROL = pattern("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
SECRET_NAME = pattern(r"(?i)(api_?key|_key$|^key$|secret|passw|credential|(^|_)token$|auth)")
SECRET_PAIR = pattern(  # every repetition is bounded: lines are hostile, and no line may cost quadratic time
    r"(?i)((?:api[_-]?key|password|passwd|secret|credential|(?:auth|access|hf|bearer)[_-]?token)[\w-]{0,40}"
    r"[\"']?\s{0,4}[=:]\s{0,4}[\"']?)(?!None\b|null\b|<redacted>|/(?:etc|run|opt|var|home|root|usr|srv|mnt)/)([^\s\"',)\\]{3,4000})"
)
SECRET_VALUE = pattern(
    r"\b((?:sk|pk|rk)-[A-Za-z0-9_-]{12,400}|hf_[A-Za-z0-9]{12,400}|gh[pousr]_[A-Za-z0-9]{20,400}|AKIA[0-9A-Z]{16}"
    r"|eyJ[A-Za-z0-9_-]{10,400}\.[A-Za-z0-9._-]{10,2000})|(?<=Bearer )\S{8,4000}"
)
WORD = pattern(r"[A-Za-z0-9+_=-]{32,}")
REDACTED = "<redacted>"
SHORT = 8  # of less no pattern above finds a secret


def looks_random(word: str) -> bool:
    """Whether a word reads like a key: long, upper, lower and digits mixed. Hashes (hex) and names are not."""
    word = word.removeprefix("SyslogIdentifier=")  # of our own units: a service's name alone is none
    kinds = (any(c.isupper() for c in word), any(c.islower() for c in word), any(c.isdigit() for c in word))
    return all(kinds) and len(set(word)) >= 16


def safe(text: str, known: tuple[str, ...] = (), cap: int = TEXT_CAP) -> str:
    """Text as it may leave the host: no control characters (newline and tab stay), no secrets, capped.

    ``known`` are secret values to remove wherever they stand; patterns catch the rest as well as patterns can.
    """
    text = text[:cap]
    if not text.isprintable():
        text = CONTROL.sub("", ANSI.sub("", text))
    for value in known:
        text = text.replace(value, REDACTED)
    if len(text) < SHORT:
        return text
    text = SECRET_VALUE.sub(REDACTED, SECRET_PAIR.sub(rf"\1{REDACTED}", text))
    return WORD.sub(lambda match: REDACTED if looks_random(match[0]) else match[0], text)


def safe_json(value: Any, known: tuple[str, ...] = ()) -> Any:
    """A JSON value with every text in it made `safe`."""
    if isinstance(value, str):
        return safe(value, known)
    if isinstance(value, list):
        return [safe_json(item, known) for item in value]
    return {safe(key): safe_json(item, known) for key, item in value.items()} if isinstance(value, dict) else value


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
