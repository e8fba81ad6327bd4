"""A base, SGLang 0.5.17 where nothing is said, as released and as patched here, and a Python that has imported one.

Both cannot be imported into one Python, and neither should be into pytest's: each tree gets a child, which lives as
long as the tests need it, since an import of SGLang takes seconds. A test asks it to run a function of ``inside_*.py``.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ddtree_ops.data import data_dir
from ddtree_ops.release.cache import Cache
from ddtree_ops.release.fetch import fetch
from ddtree_ops.release.lock import load_lock
from ddtree_ops.release.patchset import load_patchset
from ddtree_ops.release.workflow import stock

ROOT = Path(__file__).parents[3]
BASE = "sglang-0.5.17"
TRITON_UNUSED = ("triton/backends/nvidia/lib/cupti/", "triton/instrumentation/")


class RaisedThereError(Exception):
    """What a function raised in the child: the exception's class by name, its words, its traceback."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Tree:
    """A directory with SGLang in it and, from the first question on, a Python that has imported from there.

    ``triton``: a directory with Triton and its numpy; kernels then run in Triton's interpreter, or are for its compiler
    where ``kernels`` names the directory that it is to keep them in. Without it there is no Triton, whatever is
    installed beside pytest.
    """

    def __init__(self, name: str, site: Path, triton: Path | None = None, kernels: Path | None = None) -> None:
        self.name, self.site, self.triton, self.kernels = name, site, triton, kernels
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function`` returns over there. Arguments and answer are JSON. Raises RaisedThereError."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps([function.__module__, function.__name__, arguments]) + "\n")
        child.stdin.flush()
        try:
            line = child.stdout.readline()
        except BaseException:
            # a test out of time: its answer would be taken for the next question's
            child.kill()
            child.wait()
            self._child = None
            raise
        assert line, f"the Python of the {self.name} tree ended with {child.wait()}"
        answer = json.loads(line)
        if "raised" in answer:
            raise RaisedThereError(*answer["raised"])
        return answer["returned"]

    def _start(self) -> subprocess.Popen[str]:
        words = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
        # No other word of the environment: SGLang and torch take dozens of settings from there.
        environment = {word: os.environ[word] for word in words if word in os.environ}
        places = [self.site, ROOT] if self.triton is None else [self.site, self.triton, ROOT]
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
        if self.kernels is not None:
            environment["TRITON_CACHE_DIR"] = str(self.kernels)
        elif self.triton is not None:
            environment["TRITON_INTERPRET"] = "1"
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


class Forest:
    """The trees of one base below a directory, each made when it is first asked for."""

    def __init__(self, base: str, directory: Path) -> None:
        self._base, self._directory = base, directory

    @cached_property
    def _stock_site(self) -> Path:
        return stock_tree(self._directory / "stock", self._base)

    @cached_property
    def patched_site(self) -> Path:
        return patched_tree(self._stock_site, self._directory / "patched", self._base)

    @cached_property
    def triton_site(self) -> Path:
        return triton_tree(self._directory / "triton", self._base)

    @cached_property
    def stock(self) -> Tree:
        return Tree("stock", self._stock_site)

    @cached_property
    def patched(self) -> Tree:
        return Tree("patched", self.patched_site)

    @cached_property
    def interpreted(self) -> Tree:
        return Tree("interpreted", self.patched_site, self.triton_site)

    def end(self) -> None:
        for made in list(vars(self).values()):
            if isinstance(made, Tree):
                made.end()
        # 600 MB that pytest would keep for three sessions
        shutil.rmtree(self._directory / "triton", ignore_errors=True)


def stock_tree(directory: Path, base: str = BASE) -> Path:
    """SGLang's files of the released wheel (22 MB), from the cache or by pip. Raises Failed with what pip says."""
    for path, content in stock(base, "3.12", Cache()).files.items():
        if path.startswith("sglang/") and not path.startswith("sglang/multimodal_gen/"):
            _write(directory / path, content)
    return directory


def triton_tree(directory: Path, base: str = BASE) -> Path:
    """Triton and the numpy that its interpreter bears, as the base's lock has them (190 MB, once), by pip or the cache.

    Raises UsageError where the base is not locked for this Python, Failed with what pip says.
    """
    lock = load_lock(base, ".".join(platform.python_version_tuple()[:2]))
    pins = tuple(pin for pin in lock.pins if pin.name in ("triton", "numpy"))
    for wheel in fetch(replace(lock, pins=pins), Cache()):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory, [n for n in archive.namelist() if not n.startswith(TRITON_UNUSED)])
    for program in directory.glob("triton/backends/nvidia/bin/*"):
        program.chmod(0o755)
    return directory


def patched_tree(stock_site: Path, directory: Path, base: str = BASE) -> Path:
    """The same after the series. Raises Failed for a patch that does not fit exactly."""

    def read(path: str) -> bytes | None:
        file = stock_site / path
        return file.read_bytes() if file.is_file() else None

    changed = load_patchset(data_dir("patches") / base).apply(read)
    shutil.copytree(stock_site, directory, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
    for path, content in changed.items():
        (directory / path).unlink(missing_ok=True)
        _write(directory / path, content)
    return directory


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
