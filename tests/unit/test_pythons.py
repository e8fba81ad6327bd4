"""What is published works under every Python that it says, from its wheel alone and outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
NEXT = ("3.12", "3.13")
#: Tests that need nothing beyond the CLI's own dependencies.
PLAIN = (
    "tests/unit/units/test_escape.py",
    "tests/unit/units/test_render.py",
    "tests/unit/deploy/test_plan.py",
    "tests/unit/deploy/test_planfile.py",
    "tests/unit/model",
    "tests/unit/cli/test_cli.py",
    "tests/unit/cli/test_complete.py",
    "tests/unit/cli/test_help.py",
    "tests/unit/remote/test_agent.py",
    "tests/unit/snapshot",
)


def interpreter(version: str) -> str | None:
    """A Python of that version that can make virtual environments; None where this machine has none."""
    named = shutil.which(f"python{version}")
    found = [Path(named)] if named else []
    if named and Path(named).parent.name == "shims":  # pyenv's, which answers for the versions that are switched on
        found = sorted((Path(named).parents[1] / "versions").glob(f"{version}.*/bin/python{version}"), reverse=True)
    for path in found:
        if subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0:
            return str(path)
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(CHECKOUT)], CHECKOUT)
    (built,) = out.glob("*.whl")
    return built


def run(words: list[str], cwd: Path, **more: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**environment, **more},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_the_versions_that_are_tried_are_those_that_it_says() -> None:
    said = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert said["requires-python"] == ">=3.11"
    tried = {f"Programming Language :: Python :: {version}" for version in ("3.11", *NEXT)}
    assert {one for one in said["classifiers"] if "Python :: 3." in one} == tried


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", NEXT)
def test_a_later_python_runs_it(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no python{version} on this machine")
    run([python, "-m", "venv", str(tmp_path / "venv")], tmp_path)
    bin_ = tmp_path / "venv" / "bin"
    run(
        [str(bin_ / "pip"), "install", "-q", str(wheel), "pytest>=8.3,<10", "pytest-timeout>=2.3,<3", "hypothesis"],
        tmp_path,
    )
    run([str(bin_ / "ddtree"), "init", "fleet"], tmp_path)
    shown = run([str(bin_ / "ddtree"), "render", "--host", "ct200"], tmp_path / "fleet")
    assert "--speculative-ddtree-budget" in shown
    run([str(bin_ / "pip"), "uninstall", "-q", "-y", "ddtree-ops"], tmp_path)
    # the checkout's own code under that Python
    words = [
        str(bin_ / "python"),
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=--strict-markers",
        "-p",
        "no:cacheprovider",
        *PLAIN,
    ]
    told = run(words, CHECKOUT, PYTHONPATH=str(CHECKOUT))
    assert " passed" in told and "failed" not in told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pipx_installs_it_as_a_tool(wheel: Path, tmp_path: Path) -> None:
    made = tmp_path / "pipx"
    venv.create(made, with_pip=True)
    run([str(made / "bin" / "pip"), "install", "-q", "pipx>=1.7,<2"], tmp_path)
    home = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    run([str(made / "bin" / "pipx"), "install", "--python", sys.executable, str(wheel)], tmp_path, **home)
    run([str(tmp_path / "bin" / "ddtree"), "init", "fleet"], tmp_path, HOME=str(tmp_path))
    told = run([str(tmp_path / "bin" / "ddtree"), "help"], tmp_path / "fleet", HOME=str(tmp_path))
    assert "operating" in told
