"""One release: venv, files, byte code, proof that it can be imported, and its seal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from pathlib import Path

from .base import JSON, USER, HostError, fsync_dir, read_json, run, safe, sync_filesystem, write_json
from .causes import cause, kernel_archs, runs_on
from .fitting import Interpreter
from .manifest import Manifest
from .service import service_group
from .store import blob_path, clone, hash_file


def build_release(root: Path, temp: Path, final: Path, manifest: Manifest, python: Interpreter) -> list[str]:
    """Fill ``temp``; read-only and on the disk before installed.json is written, the last of all. Warnings."""
    temp.mkdir(0o755)
    packages = temp / "venv" / "lib" / f"python{manifest.python}" / "site-packages"
    make_venv(temp, manifest, python)
    for path, (sha, _, mode) in manifest.files.items():
        target = temp / path
        target.parent.mkdir(0o755, parents=True, exist_ok=True)
        copy_blob(blob_path(root, sha), target, mode)
    provided = manifest.text["requires"].get("provided") or {}
    if provided:  # entries of a .pth come after the release's own
        (packages / "ddtree-provided.pth").write_text("\n".join(python.says["directories"]) + "\n")
    move_names(temp, final)
    compiling = ["-q", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(temp), "-p", str(final)]
    done = run([python.path, "-I", "-m", "compileall", *compiling, str(packages)], timeout=1200)
    if "No space left" in done.stdout + done.stderr:
        raise HostError("disk-full", "no space left while compiling the release")
    write_json(temp / "manifest.json", manifest.text)
    tree, size = seal_tree(temp, manifest)
    smoke(temp, manifest)
    interpreter = Path(os.path.realpath(temp / "venv" / "bin" / "python"))
    with interpreter.open("rb") as file:
        known = {"path": str(interpreter), "version": python.says["full"], "sha256": hash_file(file)}
    seqs = [(read_json(path) or {}).get("seq") for path in final.parent.glob("*/installed.json")]
    told = {
        "id": manifest.id,
        "installed": time.time(),
        "seq": max([0, *(seq for seq in seqs if isinstance(seq, int))]) + 1,  # the order, whatever the clock says
        "python": python.says["full"],
        "files": len(manifest.files),
        "bytes": size,
        "tree": tree,
        "interpreter": known,
        "provided": {name: python.says["provided"][name] for name in provided},
        "directories": python.says["directories"] if provided else [],
    }
    sync_filesystem(temp)
    write_json(temp / "installed.json", told, 0o444)
    temp.chmod(0o555)
    fsync_dir(temp)
    return kernel_warnings(temp, manifest)


def make_venv(temp: Path, manifest: Manifest, python: Interpreter) -> None:
    """The venv, with what the host's index provides when the release leaves it to that."""
    import shutil  # not at the head: a question needs none of it

    bare = not manifest.requirements or not python.says["ensurepip"]
    argv = [python.path, "-I", "-m", "venv", *(["--without-pip"] if bare else []), str(temp / "venv")]
    done = run(argv, timeout=300)
    if done.returncode != 0:
        raise failure("python -m venv", done.stdout + done.stderr)
    if not manifest.requirements:
        return
    own = str(temp / "venv" / "bin" / "python")
    pip = [python.path, "-I", "-m", "pip", "--python", own] if bare else [own, "-I", "-m", "pip"]
    listed, scratch = temp / "requirements.txt", temp / "tmp"
    listed.write_text("\n".join(manifest.requirements) + "\n")
    scratch.mkdir()
    told = re.compile(r"(?i)(pip_.*|(https?|all|no)_proxy|ssl_cert_(file|dir)|requests_ca_bundle|home)")
    env = {key: value for key, value in os.environ.items() if told.fullmatch(key)}
    env.update(PATH="/usr/local/bin:/usr/bin:/bin", LC_ALL="C.UTF-8", TMPDIR=str(scratch))
    how = ["--no-input", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile", "--no-cache-dir"]
    quiet = ["--disable-pip-version-check", "--no-color", "--progress-bar=off"]
    done = run([*pip, "install", *how, *quiet, "-r", str(listed)], timeout=3600, env=env)
    if done.returncode == 0 and not bare:
        done = run([*pip, "uninstall", "--yes", *quiet[:1], "pip", "setuptools"], timeout=300, env=env)
    if done.returncode != 0:
        raise failure("pip from the host's index", done.stdout + done.stderr)
    shutil.rmtree(scratch)
    listed.unlink()


def failure(what: str, said: str) -> HostError:
    """The error of a program that ended badly: its cause when it is known, and the end of what it said."""
    if "No space left on device" in said:
        return HostError("disk-full", f"no space left: {what}")
    why, tail = cause(said), safe(said.strip()[-2000:])
    return HostError("failed", f"{what}: {safe(why)}\n{tail}" if why else f"{what}: {tail}")


def move_names(temp: Path, final: Path) -> None:
    """The venv's own texts (pyvenv.cfg, the scripts' first lines) name the directory that it will be in."""
    for path in (temp / "venv" / "pyvenv.cfg", *(temp / "venv" / "bin").iterdir()):
        if not path.is_symlink() and path.is_file() and path.stat().st_size < 1 << 16:
            data = path.read_bytes()
            if os.fsencode(temp) in data and b"\0" not in data:
                path.write_bytes(data.replace(os.fsencode(temp), os.fsencode(final)))


def smoke(temp: Path, manifest: Manifest) -> None:
    """Import what the release must be able to, in its venv; a failure is told by its cause."""
    if not manifest.smoke:
        return
    more: JSON = {}
    group = service_group()
    if group is not None:  # proves that the service user can read it, and runs no shipped code as root
        more = {"user": USER, "group": group, "extra_groups": []}
    own = str(temp / "venv" / "bin" / "python")
    done = run([own, "-I", "-B", "-c", "\n".join(manifest.smoke)], timeout=600, **more)
    if done.returncode == 0:
        return
    error = failure("the release cannot be imported", done.stderr)
    arch = str(manifest.text.get("arch") or "none")
    for library in sorted(temp.rglob("*.so*")):
        if arch != "none" and "missing arch" in error.message and (archs := kernel_archs(library)):
            error.message += f"\n{library.relative_to(temp)} has kernels for {', '.join(sorted(archs))}"
    raise error


def kernel_warnings(temp: Path, manifest: Manifest) -> list[str]:
    """Packages with GPU code of which none runs on the release's arch: "no kernel image" at the first request."""
    arch = str(manifest.text.get("arch") or "none")
    found: dict[str, set[str]] = {}
    if arch == "none":
        return []
    for path in manifest.files:
        if ".so" in path and (archs := kernel_archs(temp / path)):
            package = "/".join(path.split("/")[:5])
            found[package] = found.get(package, set()) | archs
    return [
        f"{package.rpartition('/')[2]} has kernels for {', '.join(sorted(archs))} and none for {arch}"
        for package, archs in sorted(found.items())
        if not runs_on(archs, arch)
    ]


def copy_blob(source: Path, target: Path, mode: int) -> None:
    with source.open("rb") as blob, target.open("xb") as file:
        clone(blob, file)
        os.fchmod(file.fileno(), mode)


def seal_tree(temp: Path, manifest: Manifest) -> tuple[str, int]:
    """Make all of it read-only; (sha256 over every path and its content, bytes). Each file is hashed as it lies there.

    Failed when one is not what the manifest says.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import, only here

    paths = []
    for directory, _, names in os.walk(temp):
        paths += [Path(directory) / name for name in names]
        paths += [path for path in Path(directory).iterdir() if path.is_symlink() and path.is_dir()]
        if directory != str(temp):
            Path(directory).chmod(0o555)
    paths = sorted(set(paths))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(seal_file, paths))
    state, size = hashlib.sha256(), 0
    for path, (kind, told, length) in zip(paths, hashes):  # noqa: B905 (strict= is 3.10)
        name = path.relative_to(temp).as_posix()
        wanted = manifest.files.get(name)
        if wanted is not None and wanted[0] != told:
            where = blob_path(temp.parents[1], wanted[0])
            raise HostError("failed", f"blob {wanted[0]} is damaged in the store; remove {where} and ship it again")
        state.update(json.dumps([name, kind, told]).encode() + b"\n")
        size += length
    return state.hexdigest(), size


def seal_file(path: Path) -> tuple[str, str, int]:
    """(kind, sha256 or where it points, bytes) of a file, now read-only, or link."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "link", str(path.readlink()), 0
    path.chmod(stat.S_IMODE(status.st_mode) & ~0o222)
    with path.open("rb") as file:
        return ("program" if status.st_mode & 0o111 else "file"), hash_file(file), status.st_size


def erase(tree: Path) -> None:
    """Remove a tree whose directories may be read-only."""
    import shutil  # not at the head: a question needs none of it

    if tree.is_symlink():
        tree.unlink()
        return
    for directory, _, _ in os.walk(tree):
        Path(directory).chmod(0o755)
    shutil.rmtree(tree, ignore_errors=True)
