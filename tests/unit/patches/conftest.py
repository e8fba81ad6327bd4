"""SGLang as released and as patched: the trees of each base that tests here ask for, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .trees import BASE, Forest, Tree


@pytest.fixture(scope="session")
def forests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Forest]]:
    made: dict[str, Forest] = {}

    def of(base: str) -> Forest:
        if base not in made:
            made[base] = Forest(base, tmp_path_factory.mktemp(base))
        return made[base]

    yield of
    for forest in made.values():
        forest.end()


@pytest.fixture
def base(request: pytest.FixtureRequest) -> str:
    """Chosen by the marks of `marks`."""
    return str(getattr(request, "param", BASE))


@pytest.fixture
def forest(base: str, forests: Callable[[str], Forest]) -> Forest:
    return forests(base)


@pytest.fixture
def stock(forest: Forest) -> Tree:
    """As released: where a test's fault must show."""
    return forest.stock


@pytest.fixture
def patched_site(forest: Forest) -> Path:
    return forest.patched_site


@pytest.fixture
def patched(forest: Forest) -> Tree:
    return forest.patched


@pytest.fixture
def triton_site(forest: Forest) -> Path:
    return forest.triton_site


@pytest.fixture
def interpreted(forest: Forest) -> Tree:
    """As patched, with Triton's interpreter: kernels compute."""
    return forest.interpreted
