"""The ranks of one service as a torch.distributed group over gloo: forming it, and the two collectives that it needs.

Nothing is pickled: only tensors of a type and shape that the receiver knows beforehand are sent. There is neither
encryption nor authentication: the address belongs on a network that only the ranks' hosts reach.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from . import rendezvous
from .config import ConfigError
from .rendezvous import RankLostError

log = logging.getLogger(__name__)

FORM_SECONDS = 600.0
"""How long a rank waits for the others: their models may be large and their hosts slow to come up."""

COLLECTIVE_SECONDS = 30.0
"""How long a rank waits for another inside a collective, heartbeats included."""

_RETRY_SECONDS = 1.0


class Group:
    """One of `size` ranks. Collectives must come in one order on all ranks, so from one thread at a time."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def form(self, address: tuple[str, int], listener: socket.socket | None) -> None:
        """Meet at address (host, port); rank 0 gives the socket bound to it. Blocks up to 600 s, outside Python.

        Raises RankLostError when they did not all come.
        """
        deadline = time.monotonic() + FORM_SECONDS
        host = self._reach(address, deadline)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                address[1],
                self.size,
                is_master=listener is not None,
                timeout=_left(deadline),
                # The descriptor is the store's from now on.
                master_listen_fd=None if listener is None else listener.detach(),
            )
            # A rank may be long in coming: only where all are here does the short timeout begin.
            store.set(_key(self.rank), "here")
            store.wait([_key(rank) for rank in range(self.size)], _left(deadline))
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            )
        except RuntimeError as error:
            raise RankLostError(
                f"the {self.size} ranks did not meet at {address[0]}:{address[1]}: {_reason(error)}"
            ) from None

    def agree(self, identity: bytes) -> None:
        """Raises ConfigError naming the ranks whose `identity` (bytes, of one length everywhere) is not rank 0's."""
        own = torch.frombuffer(bytearray(identity), dtype=torch.uint8).unsqueeze(0)
        found = [bytes(part.tolist()) for part in self.join(own)[0].chunk(self.size)]
        others = [str(rank) for rank, theirs in enumerate(found) if theirs != found[0]]
        if others:
            raise ConfigError(
                f"rank {', '.join(others)} and rank 0 do not compute the same: another model, "
                "--dtype, --context-length, --max-running-requests, --max-total-tokens or speculation"
            )

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What rank 0 holds in `tensor`; elsewhere it gives type and shape and is overwritten. Raises RankLostError."""
        tensor = tensor.contiguous()
        try:
            dist.broadcast(tensor, 0)
        except RuntimeError as error:
            raise self._lost(error) from None
        return tensor

    def join(self, part: Tensor) -> Tensor:
        """[rows, columns] of every rank -> [rows, size * columns], in order of rank. Raises RankLostError."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            dist.all_gather(parts, part)
        except RuntimeError as error:
            raise self._lost(error) from None
        return torch.cat(parts, dim=-1)

    def _lost(self, error: RuntimeError) -> RankLostError:
        who = "another rank"
        if self.size == 2:
            who = "rank 0, the leader," if self.rank else "rank 1"
        return RankLostError(f"{who} has gone: {_reason(error)}")

    def _reach(self, address: tuple[str, int], deadline: float) -> str:
        """The IPv4 address of rank 0, once there is one and a route to it."""
        said = False
        while True:
            try:
                host = rendezvous.resolve_host(address[0])
                rendezvous.choose_interface((host, address[1]))
            except OSError as error:
                reason = f"{address[0]}:{address[1]}: {error.strerror or error}"
                if time.monotonic() > deadline:
                    raise RankLostError(reason) from None
                if not said:
                    log.warning("%s; trying again for %.0f s", reason, deadline - time.monotonic())
                    said = True
                time.sleep(_RETRY_SECONDS)
            else:
                return host


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _key(rank: int) -> str:
    return f"rank {rank}"


def _reason(error: RuntimeError) -> str:
    """Gloo's message without its source's path and its advice."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", str(error).partition("\n")[0])
    return text.partition(". This is typically")[0]
