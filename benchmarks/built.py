"""``python -m benchmarks.built``: how long ``ddtree build`` takes to answer what was built before.

A finished release of 30,000 files in a cache of its own, asked for five times; beside each, what starting Python and
importing Typer takes, which no command of this kind can be faster than.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddtree_ops.release import Cache, Target, release_id

TIMES, FILES, CONTENTS = 5, 30_000, 2_000


def seconds(*command: str, cache: Path) -> float:
    begun = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "XDG_CACHE_HOME": str(cache)})
    return time.monotonic() - begun


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        cache = Cache(place / "ddtree")
        blobs = [cache.add_blob([b"%d" % number]) for number in range(CONTENTS)]
        files = [
            {"path": f"venv/lib/python3.12/site-packages/p/{n}.py", "sha256": sha256, "size": size, "mode": 0o644}
            for n, (sha256, size) in ((n, blobs[n % CONTENTS]) for n in range(FILES))
        ]
        cache.finish(
            {
                "id": release_id(Target("sglang-0.5.17", "3.12", "sm_120")),
                "files": files,
                "total_size": 1,
                "left_out": [],
                "slim": False,
                "requires": {"provided": {}},
                "index_requirements": [],
            }
        )
        asked: dict[str, list[float]] = {"ddtree build": [], "import typer": []}
        for _ in range(TIMES):
            build = ("-m", "ddtree_ops.cli", "build", "--engine", "sglang", "--arch", "sm_120")
            asked["ddtree build"].append(seconds(sys.executable, *build, cache=place))
            asked["import typer"].append(seconds(sys.executable, "-c", "import typer", cache=place))
    print(f"python -m benchmarks.built: Python {platform.python_version()}, a release of {FILES} files, {TIMES} times")
    for what, took in asked.items():
        print(f"{what}: median {statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f})")


if __name__ == "__main__":
    main()
