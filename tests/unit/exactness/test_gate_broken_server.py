"""A server that breaks, hangs or is not there is no evidence for or against anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from ddtree_ops.exactness import Kind, Verdict, run_gate
from tests.unit.exactness.toy import Json, Toy

from .test_gate import Make, codes


def on(kind: str, what: Json | bytes | str, after: int = 0) -> Callable[[str, Json, Json], Json | bytes | str]:
    count = 0

    def alter(asked: str, request: Json, reply: Json) -> Json | bytes | str:
        nonlocal count
        count += asked == kind
        return what if asked == kind and count > after else reply

    return alter


NO_ANSWER = [b"{", b"[1, 2]", b"null", b"\xff\xfe", b'{"a": ' * 100_000, "close", "500", "400", "404"]
WRONG_SHAPE = [b"{}", b'{"meta_info": {"finish_reason": {"type": "length"}}, "output_ids": [1e3, "x"]}']


@pytest.mark.parametrize(
    ("kind", "after", "what"),
    [("server_info", 0, what) for what in NO_ANSWER]
    + [
        (kind, after, what)
        for kind in ("generate", "score")
        for after in (0, 5)
        for what in NO_ANSWER + WRONG_SHAPE
        if (kind, after, what) != ("score", 0, "400")  # not broken: it refuses logprobs
    ],
)
def test_a_broken_server_is_inconclusive(toy: Toy, plan: Make, kind: str, after: int, what: Any) -> None:
    toy.alter = on(kind, what, after)
    verdict = run_gate(plan(expect={}))
    assert verdict.kind is Kind.INCONCLUSIVE and verdict.exit_code() == 8
    assert codes(verdict, "inconclusive") and not verdict.passed("near-tie")
    assert Verdict.from_json(verdict.to_json()) == verdict


@pytest.mark.alone
@pytest.mark.parametrize(("kind", "after"), [("server_info", 0), ("generate", 0), ("score", 0), ("score", 14)])
def test_a_hanging_server_is_inconclusive_within_the_time_limit(toy: Toy, plan: Make, kind: str, after: int) -> None:
    toy.alter = on(kind, "hang", after)
    begun = time.monotonic()
    verdict = run_gate(plan(time_limit_s=1.0))
    assert verdict.kind is Kind.INCONCLUSIVE and "time-limit" in codes(verdict, "inconclusive")
    assert time.monotonic() - begun < 3


def test_nothing_listening_is_inconclusive(plan: Make) -> None:
    verdict = run_gate(plan(url="http://127.0.0.1:1"))
    assert verdict.kind is Kind.INCONCLUSIVE and codes(verdict, "inconclusive") >= {"connection"}
