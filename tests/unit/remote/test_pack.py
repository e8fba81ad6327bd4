"""What is packed is what the host takes out, whatever the levels; the faster way is kept."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from ddtree_ops.host.agent.staging import Stream
from ddtree_ops.remote import pack
from ddtree_ops.remote.pack import AGAIN, LEVEL, STORED, TRIAL, Pace, Packer


def test_any_change_of_level_arrives_as_it_was(tmp_path: Path) -> None:
    dice = random.Random(12)
    for _ in range(30):
        packer, whole, made = Packer(), b"", b""
        for _ in range(dice.randrange(8)):
            data = dice.choice([dice.randbytes, lambda size: b"text " * (size // 5)])(dice.randrange(300_000))
            whole += data
            made += packer.pack(data, dice.choice([LEVEL, STORED]))
        (tmp_path / "made").write_bytes(made + packer.finish())
        with (tmp_path / "made").open("rb") as file:
            assert b"".join(iter(partial(Stream(file.fileno()).some, 1 << 16), b"")) == whole


def paced(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], total: int, *, may_store: bool) -> list[int]:
    """The levels of each MB where a MB costs ``seconds`` by level."""
    now, levels = 0.0, []
    monkeypatch.setattr(pack.time, "monotonic", lambda: now)
    pace = Pace(may_store=may_store)
    for _ in range(total >> 20):
        levels.append(pace.level)
        now += seconds[pace.level]
        pace.sent(1 << 20)
    return levels


def test_the_faster_way_is_kept_and_the_other_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mb = TRIAL >> 20
    for seconds, best in (({LEVEL: 2, STORED: 1}, STORED), ({LEVEL: 1, STORED: 2}, LEVEL)):
        levels = paced(monkeypatch, seconds, 3 * AGAIN, may_store=True)
        assert levels[: 2 * mb] == [LEVEL] * mb + [STORED] * mb
        assert levels.count(best) > len(levels) * 0.9
        assert set(levels[2 * mb : (AGAIN >> 20)]) == {best}, "between the trials nothing changes"
        assert set(levels[AGAIN >> 20 :]) == {LEVEL, STORED}


def test_on_a_slow_link_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(paced(monkeypatch, {LEVEL: 9, STORED: 1}, AGAIN, may_store=False)) == {LEVEL}
