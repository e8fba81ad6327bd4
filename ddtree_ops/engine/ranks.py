"""One service on several ranks: rank 0 leads and says what to compute next, the others follow.

Each order is a header of four int64 (what, and up to three sizes), then one int64 tensor with all positions and slots,
then, for a forward, the tree's mask and the embedded rows: all of them broadcasts of plain tensors. In the forward
itself every rank joins the same all-gathers (see layers.Share). What a step decides is rank 0's alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

from .group import Group
from .kv import KVPool
from .layers import Layer, Rotary
from .rendezvous import RankLostError
from .trunk import PromptRows, TreeRows, Trunk

log = logging.getLogger(__name__)

_HEADER = 4


class Order(IntEnum):
    """What rank 0 has the others do."""

    BEAT = 0
    PREFILL = 1
    VERIFY = 2
    MOVE = 3


class LeadingTrunk(Trunk):
    """Rank 0's part of every layer; tells the other ranks of everything before it does it. Raises RankLostError."""

    beat_seconds = 1.0

    def __init__(self, layers: list[Layer], rotary: Rotary, pool: KVPool, group: Group) -> None:
        super().__init__(layers, rotary, pool)
        self._group = group

    def prefill(self, x: Tensor, rows: PromptRows, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """As a Trunk."""
        before = [columns.numel() for columns in rows.cached]
        self._say(Order.PREFILL, len(rows.lengths), x.shape[0], sum(before))
        sizes = torch.tensor(rows.lengths + before)
        self._group.broadcast(torch.cat((sizes, rows.positions, rows.slots, *rows.cached)))
        self._group.broadcast(x)
        return super().prefill(x, rows, capture)

    def verify(self, x: Tensor, rows: TreeRows, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """As a Trunk."""
        batch, width = rows.nodes.shape
        self._say(Order.VERIFY, batch, width, rows.prefix.shape[1])
        self._group.broadcast(torch.cat((rows.positions, rows.prefix.flatten(), rows.nodes.flatten())))
        self._group.broadcast(rows.allowed)
        self._group.broadcast(x)
        return super().verify(x, rows, capture)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """As a Trunk."""
        self._say(Order.MOVE, source.shape[0])
        self._group.broadcast(torch.cat((source, destination)))
        super().move(source, destination)

    def beat(self) -> None:
        """An order to do nothing. Gloo sends what the receiver has asked for, so one that is gone is noticed here."""
        self._say(Order.BEAT)

    def _say(self, order: Order, *sizes: int) -> None:
        header = [int(order), *sizes]
        self._group.broadcast(torch.tensor(header + [0] * (_HEADER - len(header))))


class Follower:
    """Another rank's loop, in a thread of its own: Python could not act on a signal inside a collective."""

    def __init__(self, trunk: Trunk, group: Group, hidden: int, dtype: torch.dtype, on_crash: Callable[[str], None]):
        """hidden, dtype: of the residual stream. on_crash(reason) is called once, from the loop's thread."""
        self._trunk, self._group, self._hidden, self._dtype = trunk, group, hidden, dtype
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Nothing: the loop ends with its process, wherever it waits."""

    def join(self, timeout: float) -> None:
        """Nothing, as stop."""

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                self._obey()
        except RankLostError as error:
            self._on_crash(str(error))
        except BaseException as error:
            log.critical("the loop failed: %s", error, exc_info=True)
            self._on_crash(f"the loop failed: {type(error).__name__}: {error}")

    def _obey(self) -> None:
        order, *sizes = self._integers(_HEADER)[0].tolist()
        match Order(order):
            case Order.BEAT:
                pass
            case Order.PREFILL:
                prompts, rows, cached = sizes
                lengths, before, positions, slots, columns = self._integers(prompts, prompts, rows, rows, cached)
                going = PromptRows(positions, slots, lengths.tolist(), list(torch.split(columns, before.tolist())))
                self._trunk.prefill(self._embedded(rows), going)
            case Order.VERIFY:
                batch, width, length = sizes
                rows = batch * width
                positions, prefix, nodes = self._integers(rows, batch * length, rows)
                allowed = self._group.broadcast(torch.empty(batch, width, length + width, dtype=torch.bool))
                tree = TreeRows(positions, prefix.view(batch, length), nodes.view(batch, width), allowed)
                self._trunk.verify(self._embedded(rows), tree)
            case Order.MOVE:
                self._trunk.move(*self._integers(sizes[0], sizes[0]))

    def _integers(self, *sizes: int) -> tuple[Tensor, ...]:
        return torch.split(self._group.broadcast(torch.empty(sum(sizes), dtype=torch.int64)), list(sizes))

    def _embedded(self, rows: int) -> Tensor:
        return self._group.broadcast(torch.empty(rows, self._hidden, dtype=self._dtype))
