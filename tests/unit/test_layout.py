"""The house as README draws it: who may import whom, and how long a module gets."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ddtree_ops"
#: What each part may import of the others, beside errors, data and the version. There is no circle.
MAY: dict[str, set[str]] = {
    "engine": set(),
    "host": set(),
    "model": {"engine"},  # the form of a ladder, which the engine must know alone
    "units": {"model"},
    "release": set(),
    "remote": {"host"},
    "exactness": {"engine", "httpclients"},
    "snapshot": set(),
    "deploy": {"exactness", "host", "httpclients", "model", "release", "remote", "units"},
    "doctor": {"deploy", "host", "httpclients", "model", "release", "remote", "units"},
    "sweep": {"deploy", "engine_pair", "exactness", "httpclients", "model", "remote", "snapshot", "units"},
    "report": {"sweep"},
    "export": {"deploy", "exactness", "httpclients", "model", "sweep", "units"},
    "cli": {
        "demo",
        "deploy",
        "doctor",
        "exactness",
        "export",
        "model",
        "release",
        "remote",
        "report",
        "snapshot",
        "sweep",
        "units",
    },
}
ANYBODY = {"errors", "data", "__version__"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(module: Path) -> set[str]:
    """The parts of the package that a module imports, at its head or where it is used."""
    inside = module.relative_to(PACKAGE.parent).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            above = [*inside[: len(inside) - node.level], *([node.module] if node.module else [])]
            start = ".".join(above) if node.level else str(node.module)
            names = [f"{start}.{alias.name}" for alias in node.names] if start == "ddtree_ops" else [start]
            if node.level and not node.module:
                names = [f"{start}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("ddtree_ops.")}
    return found


@pytest.mark.parametrize("part", sorted(MAY))
def test_a_part_imports_only_what_is_below_it(part: str) -> None:
    for module in sorted((PACKAGE / part).rglob("*.py")):
        above = imported(module) - MAY[part] - ANYBODY - {part}
        assert not above, f"{module.relative_to(PACKAGE)} imports {sorted(above)}"


def test_every_part_is_known_and_there_is_no_circle() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(MAY)
    below: dict[str, set[str]] = {part: {other for other in others if other in MAY} for part, others in MAY.items()}
    while below:
        free = {part for part, others in below.items() if not others & set(below)}
        assert free, f"a circle among {sorted(below)}"
        for part in free:
            del below[part]


def test_modules_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {str(path.relative_to(PACKAGE)): length for path, length in lengths.items() if length > 400} == {}
    assert statistics.median(lengths.values()) < 120


def test_what_tests_and_measures_is_short_too() -> None:
    checkout = PACKAGE.parent
    paths = [path for top in ("tests", "benchmarks", "training") for path in (checkout / top).rglob("*.py")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {str(path.relative_to(checkout)): length for path, length in lengths.items() if length > 400} == {}
