"""One service that is two real processes on loopback: what it writes, and how each of them ends.

The tests that end a group's processes come after those that need it, in order of file.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddtree_ops.engine import measure
from ddtree_ops.engine.request import LogprobOptions, Update

from .pairs import write_pair
from .process import Engine, until
from .test_scheduler import Loop

COUNT = 20
IMPATIENT = (
    "-c",
    "import runpy\n"
    "from ddtree_ops.engine import group\n"
    "group.COLLECTIVE_SECONDS = 2.0\n"
    "runpy.run_module('ddtree_ops.engine', run_name='__main__')",
)
"""The engine, but a rank waits two seconds for another, not thirty."""


class Ranks:
    """The processes of one service, the leader first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.engines: list[Engine] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def add(self, *arguments: str, nodes: int = 2, **extra: Any) -> Engine:
        rank = len(self.engines)
        spread = ("--nnodes", str(nodes), "--tp-size", str(nodes), "--node-rank", str(rank))
        meeting = ("--dist-init-addr", f"127.0.0.1:{self._port}")
        self.engines.append(Engine(self._directory / f"rank{rank}", *arguments, *spread, *meeting, **extra))
        return self.engines[-1]

    def ready(self) -> tuple[Engine, Engine]:
        leader, follower = (engine.wait_ready() for engine in self.engines)
        return leader, follower

    def close(self) -> None:
        for engine in self.engines:
            if engine.process.poll() is None:
                engine.process.send_signal(signal.SIGCONT)
            engine.close()


def of_mode(pair: Path, mode: str) -> list[str]:
    given = ["--model-path", str(pair / "target")]
    if mode == "AR":
        return given
    given += ["--speculative-draft-model-path", str(pair / "draft"), "--speculative-algorithm"]
    if mode == "DFLASH":
        return [*given, mode]
    budget, topk = mode.split("/")
    return [*given, "DDTREE", "--speculative-ddtree-budget", budget, "--speculative-ddtree-topk", topk]


Service = Callable[[str], tuple[Engine, Engine]]


@pytest.fixture(scope="module")
def service(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The two ranks that serve the trained pair in a mode, started once, and again where a test ended them."""
    started: dict[str, Ranks] = {}

    def of(mode: str) -> tuple[Engine, Engine]:
        if mode in started and any(engine.process.poll() is not None for engine in started[mode].engines):
            started.pop(mode).close()
        if mode not in started:
            started[mode] = Ranks(tmp_path_factory.mktemp("ranks"))
            for _ in range(2):
                started[mode].add(*of_mode(trained, mode))
        return started[mode].ready()

    yield of
    for ranks in started.values():
        ranks.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def ended(engine: Engine, seconds: float = 10) -> tuple[int, list[str]]:
    """The exit code, and what the log says above INFO."""
    code = engine.process.wait(timeout=seconds)
    text = engine.log.read_text()
    assert "Traceback" not in text, text
    return code, [line for line in text.splitlines() if re.search(" (WARNING|ERROR|CRITICAL) ", line)]


Reply = tuple[list[int], list[float], int]
"""Output, its logprobs, tokens that came from the cache."""


def replies(engine: Engine, batch: list[list[int]]) -> list[Reply]:
    """What prompts sent together get."""
    params = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    answers = engine.generate(input_ids=batch, sampling_params=params, return_logprob=True)
    found = [(answer["output_ids"], answer["meta_info"]) for answer in answers]
    return [(ids, [logprob for logprob, *_ in m["output_token_logprobs"]], m["cached_tokens"]) for ids, m in found]


def from_one_rank(loop: Loop, name: str, batch: list[list[int]]) -> list[Reply]:
    def reply(update: Update) -> Reply:
        logprobs = [logprob for logprob, _ in update.output_logprobs if logprob is not None]
        return update.output_ids, logprobs, update.cached_tokens

    names = [f"{name}{i}" for i in range(len(batch))]
    loop.scheduler.submit(
        [
            loop.request(rid, prompt, COUNT, logprobs=LogprobOptions(len(prompt) - 1, 0))
            for rid, prompt in zip(names, batch, strict=True)
        ]
    )
    return [reply(update) for update in loop.wait(*names)]


@pytest.mark.parametrize("mode", ["AR", "DFLASH", "16/4"])
def test_two_ranks_write_what_one_does(service: Service, trained: Path, mode: str) -> None:
    """One after another, eight at once, two of them behind a cached prefix, and a turn that goes on from a text."""
    rows = [row.prompt for row in measure.read_rows(trained / "held_out.json")[:8]]
    leader, _ = service(mode)
    loop = Loop(trained, mode)
    loop.scheduler.start()
    found, wanted = list[Reply](), list[Reply]()
    for turn, batch in enumerate([[rows[0]], [rows[1]], rows]):
        found += replies(leader, batch)
        wanted += from_one_rank(loop, f"{turn}-", batch)
    longer = [rows[0] + found[0][0] + rows[1][:5]]
    found += replies(leader, longer)
    wanted += from_one_rank(loop, "longer", longer)
    loop.scheduler.stop("done")
    assert [(ids, cached) for ids, _, cached in found] == [(ids, cached) for ids, _, cached in wanted]
    assert found[-1][2] > len(rows[0]) and [cached > 0 for *_, cached in found[2:-1]] == [True] * 2 + [False] * 6
    for (_, mine, _), (_, theirs, _) in zip(found, wanted, strict=True):
        assert len(mine) == COUNT and mine == pytest.approx(theirs, abs=1e-5)


def test_the_leader_says_which_ranks_it_has_and_the_other_only_that_it_lives(
    service: Service,
) -> None:
    leader, follower = service("16/4")
    info = leader.client.get("/server_info").json()
    assert (info["nnodes"], info["node_rank"], info["tp_size"]) == (2, 0, 2)
    assert info["dist_init_addr"].startswith("127.0.0.1:")
    assert follower.client.get("/health").status_code == 200
    for path in ("/server_info", "/metrics", "/generate"):
        assert follower.client.get(path).status_code == 404


def test_a_killed_rank_ends_the_leader_also_under_load(service: Service) -> None:
    leader, follower = service("AR")

    def ask() -> int | str:
        body = {"input_ids": [[4, 5]] * 40, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
        try:
            return leader.client.post("/generate", json=body).status_code
        except httpx.TransportError as error:
            return type(error).__name__

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(ask)
        until(lambda: leader.state()["num_running_reqs"] > 0)
        follower.process.kill()
        code, said = ended(leader)
        assert pending.result(timeout=5) in (500, "RemoteProtocolError", "ReadError")
    assert code == 1 and len(said) == 1 and "exit: rank 1 has gone: " in said[0]


def test_a_killed_leader_ends_the_other_rank(service: Service) -> None:
    leader, follower = service("DFLASH")
    leader.process.kill()
    code, said = ended(follower)
    assert code == 1 and len(said) == 1 and "exit: rank 0, the leader, has gone: " in said[0]


def test_a_service_that_is_stopped_leaves_as_it_should(service: Service) -> None:
    both = service("16/4")
    for engine in both:
        engine.process.terminate()
    assert [ended(engine, 5) for engine in both] == [(0, []), (0, [])]


def test_a_rank_that_hangs_is_noticed_when_its_time_is_over(ranks: Ranks, pair: Path) -> None:
    """As a host that lost its power: the connection stays, nothing comes. Idle as it is, the leader asks."""
    for _ in range(2):
        ranks.add(*of_mode(pair, "AR"), program=IMPATIENT)
    leader, follower = ranks.ready()
    follower.process.send_signal(signal.SIGSTOP)
    code, said = ended(leader)
    assert code == 1 and "exit: rank 1 has gone: " in said[0]
    follower.process.send_signal(signal.SIGCONT)
    assert ended(follower)[0] == 1


def test_ranks_wait_long_for_one_another_and_end_at_once_when_told_to(ranks: Ranks, tmp_path: Path) -> None:
    """Longer than for an answer, once they are together; in each of the places where a rank can wait."""
    pair = write_pair(tmp_path / "pair", heads=(4, 4))
    for _ in range(2):
        ranks.add(*of_mode(pair, "AR"), nodes=4, program=IMPATIENT)
    alone = Ranks(tmp_path)
    alone.engines.append(ranks.engines[0])
    lonely = alone.add(*of_mode(pair, "AR"), program=IMPATIENT)
    every = [*ranks.engines, lonely]
    try:
        for engine in every:
            until(lambda engine=engine: "waiting for the others" in engine.log.read_text(), 60)  # type: ignore[misc]
        with pytest.raises(httpx.TransportError):
            lonely.client.get(f"http://127.0.0.1:{alone._port}/health")
        with pytest.raises(AssertionError):
            until(lambda: any(engine.process.poll() is not None for engine in every), 4)
        for engine in reversed(every):
            engine.process.terminate()
            assert ended(engine, 3) == (-signal.SIGTERM, [])
    finally:
        lonely.close()


def test_ranks_that_do_not_compute_the_same_refuse_one_another(ranks: Ranks, pair: Path) -> None:
    engines = [ranks.add(*of_mode(pair, "AR"), "--dtype", dtype) for dtype in ("float32", "bfloat16")]
    for engine in engines:
        code, said = ended(engine, 60)
        assert code == 1 and len(said) == 1 and "rank 1 and rank 0 do not compute the same" in said[0]


def test_an_address_that_is_not_rank_0s_is_named(ranks: Ranks, pair: Path) -> None:
    engine = Engine(
        ranks._directory / "log",
        *of_mode(pair, "AR"),
        *("--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "192.0.2.1:5000"),
    )
    ranks.engines.append(engine)
    code, said = ended(engine, 30)
    assert code == 1 and "--dist-init-addr 192.0.2.1:5000: Cannot assign requested address" in said[0]
