"""Several ranks in one process, a thread for each: who computes what, and what the other ranks are told."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ddtree_ops.engine import group as groups
from ddtree_ops.engine import rendezvous
from ddtree_ops.engine.config import ConfigError
from ddtree_ops.engine.group import Group
from ddtree_ops.engine.kv import KVPool
from ddtree_ops.engine.loading import build_decoder, identity, load_target, resolve
from ddtree_ops.engine.ranks import Follower
from ddtree_ops.engine.rendezvous import RankLostError
from ddtree_ops.engine.server import create_follower_app
from ddtree_ops.engine.serving import Server
from ddtree_ops.engine.step import Decoder, Prompt, Sequence

from .conftest import Bench, arguments, prompts
from .pairs import Plain, write_pair
from .process import until
from .test_scheduler import Loop

COUNT = 24


class Wire:
    """What the ranks of one process meet at."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.parts: list[Tensor] = [torch.empty(0)] * size

    def meet(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLostError("it has gone") from None


class Threads(Group):
    """A group whose ranks are threads."""

    def __init__(self, rank: int, wire: Wire) -> None:
        super().__init__(rank, len(wire.parts))
        self._wire = wire

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._wire.parts[self.rank] = tensor
        self._wire.meet()
        sent = self._wire.parts[0].clone()
        self._wire.meet()
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        return sent

    def join(self, part: Tensor) -> Tensor:
        self._wire.parts[self.rank] = part
        self._wire.meet()
        whole = torch.cat(self._wire.parts, dim=-1)
        self._wire.meet()
        return whole


class Ranks:
    """A leader's decoder, and the KV of all ranks."""

    def __init__(self, pair: Path, mode: str, size: int) -> None:
        a = arguments(pair, mode, nnodes=size)
        resolved = resolve(a)
        self.wire, self.ends = Wire(size), list[str]()
        self.decoder = build_decoder(a, resolved, Threads(0, self.wire))
        self.pools = [self.decoder.trunk.pool]
        for rank in range(1, size):
            group = Threads(rank, self.wire)
            _, trunk = load_target(a, resolved, group)
            self.pools.append(trunk.pool)
            Follower(trunk, group, resolved.model.hidden_size, torch.float32, self.ends.append).start()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that four ranks can share."""
    return write_pair(tmp_path_factory.mktemp("wide") / "pair", seed=26, heads=(8, 4))


@pytest.fixture
def ranks(wide: Path) -> Iterator[Callable[[str, int], Ranks]]:
    made: list[Ranks] = []

    def make(mode: str, size: int) -> Ranks:
        made.append(Ranks(wide, mode, size))
        return made[-1]

    yield make
    for group in made:
        group.wire.barrier.abort()


def written(decoder: Decoder, width: int, count: int = COUNT) -> list[list[int]]:
    """Outputs of six prompts, three prefilled behind a prefix of theirs, all stepped together."""
    sequences, batch = [], prompts(6, seed=31, low=3, high=12)
    for start in (0, 3):
        asked = []
        for i, prompt in enumerate(batch[start : start + 3]):
            row = decoder.table.allocate(len(prompt) + count + width)
            assert row is not None
            cached = 0
            if start and i != 1:
                cached = 2
                decoder.prefill([Prompt(Sequence(row), prompt[:cached], cached - 1, True)])
            asked.append(Prompt(Sequence(row), prompt, len(prompt) - 1, True, cached))
        decoder.prefill(asked)
        sequences += [prompt.sequence for prompt in asked]
    while any(len(sequence.output) < count for sequence in sequences):
        decoder.step([sequence for sequence in sequences if len(sequence.output) < count])
    return [sequence.output[:count] for sequence in sequences]


def halves(pool: KVPool) -> tuple[Tensor, Tensor]:
    """(keys, values) of every slot but nobody's."""
    return pool._data[:, 1:].chunk(2, dim=2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mode", ["AR", "DFLASH", "16/4", "60/12"])
def test_ranks_write_one_ranks_tokens_and_hold_its_kv(
    ranks: Callable[[str, int], Ranks], wide: Path, mode: str, size: int
) -> None:
    alone, several = Bench.of(wide, mode), ranks(mode, size)
    outputs = written(several.decoder, alone.width)
    assert outputs == written(alone.decoder, alone.width)
    plain = Plain(wide)
    assert outputs == [plain.greedy(prompt, COUNT) for prompt in prompts(6, seed=31, low=3, high=12)]
    # Keys of all ranks beside one another, then values: what one rank holds. A move that one rank missed shows.
    for part, whole in enumerate(halves(alone.decoder.trunk.pool)):
        joined = torch.cat([halves(pool)[part] for pool in several.pools], dim=2)
        assert joined.any()
        assert_close(joined, whole, atol=1e-5, rtol=1e-5)
    several.decoder.trunk.beat()
    assert not several.ends


def test_a_follower_ends_when_the_others_are_gone_or_an_order_makes_no_sense(
    ranks: Callable[[str, int], Ranks],
) -> None:
    group = ranks("AR", 2)
    group.wire.barrier.abort()
    until(lambda: group.ends == ["it has gone"])
    group = ranks("AR", 2)
    Threads(0, group.wire).broadcast(torch.tensor([9, 0, 0, 0]))
    until(lambda: bool(group.ends))
    assert "9 is not a valid Order" in group.ends[0]


def test_an_idle_loop_beats_and_one_that_works_does_not(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(pair, "8/4")
    beats: list[str] = []
    monkeypatch.setattr(loop.decoder.trunk, "beat_seconds", 0.01)
    monkeypatch.setattr(loop.decoder.trunk, "beat", lambda: beats.append(threading.current_thread().name))
    loop.scheduler.start()
    until(lambda: len(beats) > 3)
    loop.scheduler.submit([loop.request("a", [4, 5])])
    (update,) = loop.wait("a")
    assert len(update.output_ids) == 30
    seen = len(beats)
    until(lambda: len(beats) > seen)
    assert set(beats) == {"engine"} and loop.scheduler.busy_for() == 0

    def gone() -> None:
        raise RankLostError("rank 1 has gone: connection closed")

    monkeypatch.setattr(loop.decoder.trunk, "beat", gone)
    until(lambda: loop.crashes == ["rank 1 has gone: connection closed"])
    assert loop.scheduler.failure == loop.crashes[0]


def test_one_rank_never_beats(pair: Path) -> None:
    assert Bench.of(pair, "AR").decoder.trunk.beat_seconds is None


def test_ranks_that_compute_something_else_are_named(pair: Path, wide: Path) -> None:
    a = arguments(pair, "AR")
    own = identity(a, resolve(a))
    for others in (
        arguments(wide, "AR"),
        arguments(pair, "8/4"),
        arguments(pair, "AR", dtype="bfloat16"),
        arguments(pair, "AR", max_total_tokens=90),
        arguments(pair, "AR", context_length=90, max_total_tokens=resolve(a).max_total_tokens),
    ):
        assert identity(others, resolve(others)) != own

    class Told(Group):
        def join(self, part: Tensor) -> Tensor:
            return torch.cat((part, part + 1, part), dim=-1)

    with pytest.raises(ConfigError, match="rank 1 and rank 0 do not compute the same"):
        Told(0, 3).agree(b"\x01\x02")


def test_the_interface_is_that_of_the_route_unless_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.INTERFACE, "")
    for host in ("127.0.0.1", "127.0.0.2"):
        monkeypatch.delenv(rendezvous.INTERFACE, raising=False)
        rendezvous.choose_interface((host, 5000))
        assert os.environ[rendezvous.INTERFACE] == "lo"
    monkeypatch.setenv(rendezvous.INTERFACE, "mine")
    rendezvous.choose_interface(("127.0.0.1", 5000))
    assert os.environ[rendezvous.INTERFACE] == "mine"


class Failing:
    """A loop that says it failed when it is stopped, or by itself."""

    def __init__(self, server: Server, by_itself: bool) -> None:
        self._server, self._by_itself = server, by_itself

    def start(self) -> None:
        threading.Thread(target=self._end).start()

    def _end(self) -> None:
        running = self._server._uvicorn
        assert running is not None
        until(lambda: running.started)
        if self._by_itself:
            self._server.crashed("rank 1 has gone")
        else:
            running.should_exit = True

    def stop(self, reason: str) -> None:
        self._server.crashed(reason)

    def join(self, timeout: float) -> None:
        pass


@pytest.mark.parametrize("by_itself", [True, False])
def test_ranks_that_go_after_a_stop_are_no_failure(by_itself: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = Server()
        loop = Failing(server, by_itself)
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        assert server.serve_until_stopped(create_follower_app(), loop, listener) == int(by_itself)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_name_that_nobody_knows_yet_is_asked_again_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([socket.gaierror(-3, "Temporary failure"), OSError(101, "Network is unreachable"), None])

    def resolve_host(_host: str) -> str:
        if (failure := next(answers)) is not None:
            raise failure
        return "127.0.0.1"

    monkeypatch.setattr(rendezvous, "resolve_host", resolve_host)
    monkeypatch.setattr(groups, "_RETRY_SECONDS", 0.01)
    monkeypatch.setenv(rendezvous.INTERFACE, "lo")
    assert Group(1, 2)._reach(("node-0", 5000), time.monotonic() + 60) == "127.0.0.1"
    (said,) = caplog.messages
    assert said.startswith("node-0:5000: Temporary failure; trying again for ")
    answers = iter([OSError(101, "Network is unreachable")])
    with pytest.raises(RankLostError, match="node-0:5000: Network is unreachable"):
        Group(1, 2)._reach(("node-0", 5000), time.monotonic() - 1)


def test_what_gloo_says_is_kept_to_one_line() -> None:
    text = "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused\nby"
    assert groups._reason(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:1"
    assert groups._reason(RuntimeError("Timed out")) == "Timed out"
