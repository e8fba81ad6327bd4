"""Given this checkout's conftest and several workers, a run says what it left out, and who is alone is alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
MANY = """
import os, pathlib, pytest, time

log = pathlib.Path(__file__).parent / "log"

def note(word):
    with log.open("a") as file:
        file.write(f"{word} {os.environ.get('PYTEST_XDIST_WORKER', 'alone')}\\n")

@pytest.mark.parametrize("n", range(COUNT))
def test_shares(n):
    note("shared begins")
    time.sleep(0.1)
    note("shared ends")

@pytest.mark.alone
def test_alone():
    note("alone begins")
    time.sleep(0.3)
    note("alone ends")

@pytest.mark.gpu
def test_left_out():
    note("not left out")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One with the real conftest and settings, and two files of tests: a long one and a short one."""
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(CHECKOUT / "tests" / "conftest.py", tmp_path / "tests")
    for name, count in (("long", 40), ("short", 2)):
        (tmp_path / "tests" / f"test_{name}.py").write_text(MANY.replace("COUNT", str(count)))
    return tmp_path


def run(checkout: Path, *words: str) -> str:
    """What pytest says at its end."""
    environment = {name: value for name, value in os.environ.items() if name not in ("GPU", "PYTEST_ADDOPTS")}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=checkout,
        env=environment,
        text=True,
        capture_output=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["one process", "workers"])
def test_what_is_left_out_is_counted_once_and_pytests_summary_is_last(checkout: Path, words: tuple[str, ...]) -> None:
    *_, told, summary = run(checkout, *words).strip().splitlines()
    assert told.startswith("left out: 2 tests marked 'gpu':")
    assert "44 passed" in summary


def test_nothing_runs_beside_a_test_that_is_alone(checkout: Path) -> None:
    run(checkout, "-n", "2")
    lines = (checkout / "tests" / "log").read_text().splitlines()
    log = [line.rpartition(" ")[0] for line in lines]
    assert log.count("alone begins") == 2 and "not left out" not in log
    assert len({line for line in lines if line.startswith("alone begins")}) == 1, "one worker takes all that is alone"
    inside = most = 0
    for word, after in zip(log, [*log[1:], ""], strict=True):
        inside += {"begins": 1, "ends": -1}[word.split()[1]]
        most = max(most, inside)
        if word == "alone begins":
            assert inside == 1 and after == "alone ends"
    assert most == 2, "the two workers never ran at once, so nothing was shown"
