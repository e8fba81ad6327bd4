"""SGLang 0.5.17 as released and as patched here, and a Python that has imported one of them.

Both cannot be imported into one Python, and neither should be into pytest's: each tree gets a child, which lives as long
as the tests need it, since an import of SGLang takes seconds. A test asks it to run a function of ``inside_*.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddtree_ops.data import data_dir
from ddtree_ops.release.cache import Cache
from ddtree_ops.release.lock import parse_lock
from ddtree_ops.release.wheels import fetch, members

ROOT = Path(__file__).parents[3]
PATCHES = data_dir("patches") / "sglang-0.5.17"


class RaisedThereError(Exception):
    """What a function raised in the child: the exception's class by name, its words, its traceback."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Tree:
    """A directory with SGLang in it and, from the first question on, a Python that has imported from there."""

    def __init__(self, name: str, site: Path) -> None:
        self.name, self.site = name, site
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function`` returns over there. Arguments and answer are JSON. Raises RaisedThereError."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps([function.__module__, function.__name__, arguments]) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
        assert line, f"the Python of the {self.name} tree ended with {child.wait()}"
        answer = json.loads(line)
        if "raised" in answer:
            raise RaisedThereError(*answer["raised"])
        return answer["returned"]

    def _start(self) -> subprocess.Popen[str]:
        words = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
        # No other word of the environment: SGLang and torch take dozens of settings from there.
        environment = {word: os.environ[word] for word in words if word in os.environ}
        environment |= {"PYTHONPATH": f"{self.site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.unit.patches.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def end(self) -> None:
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child.wait(timeout=30)


def stock_tree(directory: Path) -> Path:
    """SGLang's Python files of the wheel that tests/gpu's lock pins, from the cache or by pip."""
    lock = parse_lock(ROOT.joinpath("tests", "gpu", "wheels.lock").read_text(), "wheels.lock")
    lock = replace(lock, pins=tuple(pin for pin in lock.pins if pin.name == "sglang"))
    (wheel,) = fetch(lock, Cache())
    with zipfile.ZipFile(wheel) as archive:
        for member in members(wheel):
            if member.path.startswith("sglang/") and "multimodal_gen" not in member.path and "/test/" not in member.path:
                archive.extract(member.name, directory)
    return directory


def patched_tree(stock: Path, directory: Path) -> Path:
    """The same after the series, strictly applied."""
    shutil.copytree(stock, directory, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PATCHES.joinpath("series").read_text().split():
        text = PATCHES.joinpath(name).read_text()
        for line in text.splitlines():
            if line.startswith("--- a/"):
                file = directory / line.removeprefix("--- a/")
                content = file.read_bytes()
                file.unlink()
                file.write_bytes(content)
        command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-d", str(directory)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "offset" not in done.stdout, f"{name}: {done.stdout}{done.stderr}"
    return directory
