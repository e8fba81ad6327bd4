"""What a shell offers after TAB, through the program that a shell asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; from ddtree_ops.cli import main; sys.argv = ['ddtree']; main()"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    for name in ("ct200", "ct201", "b300", "workspace", "profiles/b8k4", "profiles/b16k4", "profiles/ar"):
        file = tmp_path / f"inventories/{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("not even read")
    (tmp_path / "inventories/notes.txt").touch()
    for run in ("ct200-one", "ct200-two", "no-run"):
        (tmp_path / "sweeps" / run).mkdir(parents=True)
    for run in ("ct200-one", "ct200-two"):
        (tmp_path / f"sweeps/{run}/records.jsonl").touch()
    return tmp_path


def offered(line: str, folder: Path, **environment: str) -> list[str]:
    """What bash would show for a line that the cursor stands at the end of."""
    words = line.split(" ")
    asked = {"_DDTREE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    environment = {key: value for key, value in os.environ.items() if key != "DDTREE_WORKSPACE"} | environment
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **asked}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == "", done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("ddtree plan --host ", ["all", "b300", "ct200", "ct201"]),
        ("ddtree status --host ct", ["ct200", "ct201"]),
        ("ddtree sweep --host b", ["b300"]),
        ("ddtree deploy --host ct200 --profile b", ["b16k4", "b8k4"]),
        ("ddtree report sweeps/", ["sweeps/ct200-one", "sweeps/ct200-two"]),
        ("ddtree snapshot --run sweeps/ct200-o", ["sweeps/ct200-one"]),
        ("ddtree help exa", ["exactness"]),
    ],
)
def test_names_of_the_workspace_are_offered(fleet: Path, line: str, names: list[str]) -> None:
    assert offered(line, fleet) == names


def test_the_workspace_is_the_one_that_the_line_means(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert offered("ddtree plan --host ct", elsewhere) == []
    assert offered("ddtree plan --host ct", elsewhere, DDTREE_WORKSPACE=str(fleet)) == ["ct200", "ct201"]
    assert offered(f"ddtree plan --workspace {fleet} --host ct", elsewhere) == ["ct200", "ct201"]
    assert offered("ddtree plan --host b", fleet / "sweeps") == ["b300"]
