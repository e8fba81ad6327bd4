"""Fixtures of the real test hosts. Every test here is marked ``hosts``: without HOSTS=1 it is left out, visibly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Lab, TestHost, laboratory
from .machine import HarnessError

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the run's own conftest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """All hosts of this run; destroyed at its end, in one process also after Ctrl-C.

    Of a run in workers Ctrl-C can leave some up; whoever takes their slot next clears it first.
    """
    context = laboratory()
    try:
        made = context.__enter__()
    except HarnessError as error:
        pytest.fail(f"HOSTS=1, but: {error}", pytrace=False)
    try:
        yield made
    finally:
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def _two(lab: Lab) -> tuple[TestHost, TestHost]:
    return lab.host("ct200"), lab.host("b300")


@pytest.fixture
def ct200(_two: tuple[TestHost, TestHost]) -> TestHost:
    """The host ct200, up and linked whatever the test before did; the run shares its disk (``reset`` empties it)."""
    _two[0].up()
    return _two[0]


@pytest.fixture
def b300(_two: tuple[TestHost, TestHost]) -> TestHost:
    """The host b300, as ct200."""
    _two[1].up()
    return _two[1]


@pytest.fixture
def testhost(ct200: TestHost) -> TestHost:
    """Any host."""
    return ct200
