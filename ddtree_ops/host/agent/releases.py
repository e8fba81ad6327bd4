"""Blobs into the store, releases out of it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import IO, Any

from .base import (
    JSON,
    RELEASE,
    SHA256,
    USER,
    HostError,
    absolute,
    fsync_dir,
    integer,
    make_dir,
    member,
    named,
    read_json,
    run,
    safe,
    sync_filesystem,
    write_json,
)
from .service import Service, service_group
from .system import glibc


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
    if manifest.get("format") != 2:
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
