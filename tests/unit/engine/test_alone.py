"""The engine is shipped alone: it imports its own modules and the packages that its release pins, nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from ddtree_ops import engine

PINNED = {"torch", "numpy", "safetensors", "tokenizers", "starlette", "uvicorn", "prometheus_client"}
MODULES = sorted(Path(engine.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_nothing_of_the_rest(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            root = name.partition(".")[0]
            assert root in PINNED or root in sys.stdlib_module_names, f"{module.name} imports {name}"


def test_arguments_are_checked_without_torch() -> None:
    """A wrong command line answers at once: nothing that main imports before parsing may import torch."""
    for name in ("__main__", "arguments", "config", "faults", "ladder", "rendezvous"):
        tree = ast.parse((MODULES[0].parent / f"{name}.py").read_text())
        roots = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level}
        assert roots <= {"arguments", "config", "faults", "ladder", "rendezvous"}
        assert not any(alias.name == "torch" for n in tree.body if isinstance(n, ast.Import) for alias in n.names)
