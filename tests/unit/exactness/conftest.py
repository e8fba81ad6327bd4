from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddtree_ops.exactness import GatePlan, Prompt
from tests.unit.exactness.toy import Toy


@pytest.fixture
def toy() -> Iterator[Toy]:
    server = Toy()
    yield server
    server.close()


PROMPTS = [Prompt(id=f"p{i}", kind="test", text=f"{i} bottles of {'xyzabc'[i % 6]}") for i in range(10)]


@pytest.fixture
def plan(toy: Toy) -> Callable[..., GatePlan]:
    def make(**changes: Any) -> GatePlan:
        fields: dict[str, Any] = {
            "url": toy.url,
            "algorithm": "ddtree",
            "dtype": "float32",
            "policy": "exact",
            "epsilon_roundings": 2,
            "concurrency": (1, 8),
            "max_new_tokens": 24,
            "prompts": PROMPTS,
            "time_limit_s": 90,
            "expect": {"speculative_ddtree_budget": 8},
        }
        return GatePlan(**(fields | changes))

    return make
