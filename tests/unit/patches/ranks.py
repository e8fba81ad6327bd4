"""Inside a tree's Python: real processes, one a tensor-parallel rank, over torch.distributed's gloo."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .bases import here

LIMIT_S = 100.0
"""For all ranks together: a rank that left the others alone leaves them waiting."""


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of ``size`` ranks of SGLang's own groups, in rank order.

    A rank that raises answers {"raised": its words}; one that says nothing within LIMIT_S answers {"raised": "late"}.
    The processes are forks of this one, which has imported what they need.
    """
    fork = get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(size):
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(
                target=_rank, args=(there, rank, size, Path(directory, "meeting"), function, arguments), daemon=True
            )
            process.start()
            there.close()
            ranks.append((process, here))
        answers = [_answer(here) for _, here in ranks]
        for process, _ in ranks:
            process.kill()
            process.join()
    return answers


def _answer(here: Connection) -> Any:
    try:
        return here.recv() if here.poll(LIMIT_S) else {"raised": "late"}
    except EOFError:
        return {"raised": "gone"}


def _rank(
    there: Connection, rank: int, size: int, meeting: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
        _join(rank, size, meeting)
        there.send(function(rank, *arguments))
    except BaseException as error:
        there.send({"raised": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def _join(rank: int, size: int, meeting: Path) -> None:
    from sglang.srt.distributed import init_distributed_environment
    from sglang.srt.distributed.parallel_state import GroupCoordinator, set_custom_all_reduce

    set_custom_all_reduce(False)
    # Through an operator that is registered for the GPU alone, and calls this.
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    init_distributed_environment(
        world_size=size, rank=rank, local_rank=rank, backend="gloo", distributed_init_method=f"file://{meeting}"
    )
    here().join(rank, size)
