"""Which generation a rollback goes to."""

from __future__ import annotations

import pytest

from ddtree_ops.deploy.facts import Facts, facts
from ddtree_ops.deploy.rollback import choose_rollback
from ddtree_ops.errors import Failed

from .test_plan import empty_host

GENERATIONS = [
    {"n": 0, "confirmed": True},
    {"n": 1, "confirmed": True},
    {"n": 2, "confirmed": False},
    {"n": 3, "confirmed": True},
]


@pytest.mark.parametrize(("current", "to", "answer"), [(3, None, 1), (3, 0, 0), (1, None, 0), (3, 2, 2)])
def test_rollback_goes_to_the_newest_proven_one_before(current: int, to: int | None, answer: int) -> None:
    seen = only_confirmed(current)
    assert choose_rollback(seen, GENERATIONS, to) == answer


@pytest.mark.parametrize(("current", "to"), [(0, None), (3, 9), (3, 3)])
def test_rollback_refuses_what_is_not_there(current: int, to: int | None) -> None:
    with pytest.raises(Failed):
        choose_rollback(only_confirmed(current), GENERATIONS, to)


def only_confirmed(confirmed: int) -> Facts:
    """Facts of which only the confirmed generation matters."""
    return facts(empty_host(state={"confirmed": confirmed, "pending": None}))
