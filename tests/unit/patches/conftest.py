"""SGLang as released and as patched: two trees for all tests here, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .trees import Tree, patched_tree, stock_tree


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
def patched(stock_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    tree = Tree("patched", patched_tree(stock_site, tmp_path_factory.mktemp("patched") / "site"))
    yield tree
    tree.end()
