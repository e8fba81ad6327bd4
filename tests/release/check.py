"""``make release-check``: releases are the same bytes wherever and whenever they are built; the patches apply; --slim.

Builds each release in two places (other directory, checkout copied with other times, clock by faketime where it is
installed, umask, time zone, locale, hash seed), compares every byte, and exits 1 at any difference.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
SOURCES = ("ddtree_ops", "patches", "templates", "inventories")
BASE = "sglang-0.5.17"
#: Gigabytes that a host with GPUs has already, or gets once from an index; nothing of ours is in them.
PROVIDED = ("torch", "torchvision", "torchaudio", "triton")
SLIM = [
    "--engine",
    "sglang",
    "--arch",
    "sm_90",
    "--slim",
    *(word for name in PROVIDED for word in ("--provided", name)),
]
RELEASES = {"the reference engine": ["--engine", "reference"], "SGLang, slim, sm_90": SLIM}
REPACK = f"""
import sys; from pathlib import Path
from ddtree_ops.data import data_dir
from ddtree_ops.release import Cache, workflow
from ddtree_ops.release.patchset import load_patchset
from ddtree_ops.release.repack import repack
wheel = Cache().wheels / workflow.stock({BASE!r}, "3.12", Cache()).name
print(repack(wheel, load_patchset(data_dir("patches") / {BASE!r}), Path(sys.argv[1])).name)
"""


@dataclass(frozen=True)
class Place:
    """Where and how a build runs."""

    directory: Path
    umask: int
    clock: str | None
    environment: dict[str, str]

    def python(self, *words: str) -> str:
        """Runs this Python there; returns its stdout. Ends the check when it fails."""
        command = [sys.executable, *words]
        if self.clock is not None and shutil.which("faketime"):
            command = ["faketime", self.clock, *command]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.directory / "checkout"),
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            **self.environment,
        }
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=environment,
            umask=self.umask,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"release-check: {' '.join(words[:4])} failed in {self.directory}")
        return done.stdout

    def prepare(self, wheels: Path, age_s: int) -> None:
        """A copy of the sources that is ``age_s`` older, and the wheels, so that no clock meets a certificate."""
        for name in SOURCES:
            shutil.copytree(
                CHECKOUT / name, self.directory / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for path in (self.directory / "checkout").rglob("*"):
            os.utime(path, (time.time() - age_s, time.time() - age_s))
        shutil.copytree(wheels, self.directory / "cache/ddtree/wheels", copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def main() -> int:
    from ddtree_ops.release import Cache

    problems = patches()
    for name, words in RELEASES.items():
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", "ddtree_ops.cli", "build", *words], cwd=CHECKOUT, check=True)
    with tempfile.TemporaryDirectory(prefix="release-check-", dir=Cache().directory) as scratch:
        places = [
            Place(Path(scratch) / "one", 0o022, None, {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}),
            Place(
                Path(scratch) / "another/place here",
                0o077,
                "2031-02-03 04:05:06",
                {"TZ": "Pacific/Chatham", "LC_ALL": "C.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "77"},
            ),
        ]
        for age, place in enumerate(places, 1):
            place.prepare(Cache().wheels, age * 10_000_000)
        for name, words in RELEASES.items():
            problems += [f"{name}: {problem}" for problem in compare_builds(places, words)]
        problems += compare_wheels(places)
    for problem in problems:
        print(f"DIFFERENT: {problem}")
    clock = "another clock, " if shutil.which("faketime") else "(no faketime here: the same clock), "
    if not problems:
        print(f"release-check: the same bytes in two places ({clock}directory, umask, time zone, locale, hash seed)")
    return 1 if problems else 0


def patches() -> list[str]:
    """The series over the real wheel."""
    print(f"== the patches of {BASE}", flush=True)
    if not (CHECKOUT / "patches" / BASE / "series").is_file():
        print("there are none in this checkout: the stock engine")
        return []
    done = subprocess.run([sys.executable, "-m", "ddtree_ops.cli", "patch", "check"], cwd=CHECKOUT, check=False)
    return [] if done.returncode == 0 else [f"patches/{BASE} is not sound"]


def compare_builds(places: list[Place], words: list[str]) -> list[str]:
    """What differs between the releases of two places: ids, manifests, and the bytes of every file."""
    ids, manifests = [], []
    for place in places:
        release = json.loads(place.python("-m", "ddtree_ops.cli", "build", *words, "--json"))["release"]
        ids.append(release)
        manifests.append(place.directory / "cache/ddtree/releases" / release / "manifest.json")
    if ids[0] != ids[1]:
        return [f"ids {ids[0]} and {ids[1]}"]
    if manifests[0].read_bytes() != manifests[1].read_bytes():
        return [f"manifests of {ids[0]}"]
    manifest: dict[str, Any] = json.loads(manifests[0].read_text())
    problems = []
    for entry in manifest["files"]:
        one, other = (
            place.directory / "cache/ddtree/blobs" / entry["sha256"][:2] / entry["sha256"] for place in places
        )
        if not filecmp.cmp(one, other, shallow=False) or sha256(one) != entry["sha256"]:
            problems.append(entry["path"])
    size, kernels = manifest["total_size"], sum(e["size"] for e in manifest["files"] if "/sgl_kernel/" in e["path"])
    told = f", of them {kernels / 1e6:.1f} MB of sglang-kernel" if kernels else ""
    print(f"{ids[0]}: {len(manifest['files'])} files, {size / 1e6:.0f} MB{told}; compared byte for byte")
    return problems


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compare_wheels(places: list[Place]) -> list[str]:
    """The repacked wheel as a file."""
    made = []
    for place in places:
        out = place.directory / "out"
        out.mkdir()
        made.append(out / place.python("-c", REPACK, str(out)).strip())
    if made[0].name != made[1].name or not filecmp.cmp(made[0], made[1], shallow=False):
        return [f"the wheels {made[0].name} and {made[1].name}"]
    print(f"{made[0].name}: {made[0].stat().st_size / 1e6:.0f} MB, the same wheel twice")
    return []


if __name__ == "__main__":
    sys.exit(main())
