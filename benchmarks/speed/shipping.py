"""The first upload of a release beside ``rsync -a`` over ssh of the same files. Installing is the host's own work."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddtree_ops.release import Cache
from tests.hosts.harness import TestHost

from .fleet import Fleet
from .rows import SOURCES, Row
from .timing import Case, says
from .venvs import CHECKOUT, venv

SEED = 20261130


def shipping(fleet: Fleet) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="ddtree-ship-", dir="/var/tmp") as directory:
        for name, what, sizes, bound in (
            ("ship-500mb", "sending 500 MB in 50 files, verified", [10_000_000] * 50, 1.25),
            ("ship-small", "sending 10,000 files of 4 KB, verified", [4096] * 10_000, 1.0),
        ):
            folder = Path(directory, name)
            manifest, tree = made(folder, sizes)
            yield row(fleet, name, what, folder, manifest, tree, bound)


def give_rsync(host: TestHost) -> str:
    """This machine's rsync with its libraries, on a host that has none; how it is called there."""
    program = shutil.which("rsync")
    if program is None:
        raise SystemExit("rsync is not installed here")
    told = subprocess.check_output(["ldd", program], text=True)
    for path in [program, *re.findall(r"=> (/\S+)", told)]:
        if not re.search(r"/(libc|ld-linux[^/]*|libm|libpthread)\.so", path):
            host.put(f"/opt/rsync/{Path(path).name}", Path(path).read_bytes(), 0o755)
    return "env LD_LIBRARY_PATH=/opt/rsync /opt/rsync/rsync"


def made(folder: Path, sizes: list[int]) -> tuple[Path, Path]:
    """A release in a cache, and the same files as a tree: half of each file is noise, half text."""
    dice, cache, tree = random.Random(SEED), Cache(folder / "cache"), folder / "tree"
    rows = []
    tree.mkdir(parents=True)
    for n, size in enumerate(sizes):
        content = dice.randbytes(size // 2) + (b"line %d of a text\n" % n * size)[: size - size // 2]
        sha256, _ = cache.add_blob([content])
        rows.append({"path": f"share/f/{n}", "sha256": sha256, "size": size, "mode": 0o644})
        (tree / f"{n}").write_bytes(content)
    fit = {"python": "3.11", "machine": "x86_64", "glibc": "2.17"}
    manifest = {"format": 2, "id": "5" * 16, "arch": "none", "requires": fit, "files": rows, "smoke": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "manifest.json", tree


def row(fleet: Fleet, name: str, what: str, folder: Path, manifest: Path, tree: Path, bound: float) -> Row:
    host = fleet.hosts[0]

    def clear() -> None:
        host.sh("rm -rf /var/tmp/ddtree-staging-root /var/tmp/by-rsync; sync")

    argv = [str(venv("ddtree") / "python"), "-m", "benchmarks.speed.upload", str(folder / "cache"), str(manifest)]
    argv += [host.name, host.address, host.hostkey, str(host.identity_file)]
    ours = Case("ddtree's upload", [argv], CHECKOUT, SOURCES, says("whole"), clear)
    ssh = shlex.join(["ssh", *fleet.ssh_options(host)])
    theirs = [
        "rsync",
        "-a",
        "--rsync-path",
        give_rsync(host),
        "-e",
        ssh,
        f"{tree}/",
        f"root@{host.address}:/var/tmp/by-rsync/",
    ]
    rsync = Case("rsync -a over ssh", [theirs], before=clear)
    return Row(name, what, ours, [rsync], {rsync.name: bound})
