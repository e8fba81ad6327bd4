"""SGLang as released and as patched: two trees for all tests here, made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .trees import Tree, patched_tree, stock_tree, triton_tree


@pytest.fixture(scope="session")
def stock_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stock_tree(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="session")
def stock(stock_site: Path) -> Iterator[Tree]:
    """As released: where a test's fault must show."""
    tree = Tree("stock", stock_site)
    yield tree
    tree.end()


@pytest.fixture(scope="session")
def patched_site(stock_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_tree(stock_site, tmp_path_factory.mktemp("patched") / "site")


@pytest.fixture(scope="session")
def patched(patched_site: Path) -> Iterator[Tree]:
    tree = Tree("patched", patched_site)
    yield tree
    tree.end()


@pytest.fixture(scope="session")
def triton_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    triton = triton_tree(tmp_path_factory.mktemp("triton"))
    yield triton
    # 600 MB that pytest would keep for three sessions
    shutil.rmtree(triton)


@pytest.fixture(scope="session")
def interpreted(patched_site: Path, triton_site: Path) -> Iterator[Tree]:
    """As patched, with Triton's interpreter: kernels compute."""
    tree = Tree("interpreted", patched_site, triton_site)
    yield tree
    tree.end()
