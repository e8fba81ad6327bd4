"""DDTREE: what must hold in every step. Cheap checks run always; those that wait for the device, for debugging only.

``SGLANG_DDTREE_DEBUG=1`` turns the dear ones on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree_args import path_dependent
from sglang.srt.speculative.ddtree_build import DraftTrees
from sglang.srt.speculative.ddtree_mask import cells_of, read_mask
from sglang.srt.speculative.ddtree_verify import Accepted, check_accepted
from sglang.srt.utils import get_bool_env_var
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput

AGREEMENTS = 8
"""Steps in which tensor-parallel ranks compare their trees; a rank that differs at all differs early."""


class Checks:
    """Of one worker. Each method raises RuntimeError or AssertionError; none changes anything."""

    def __init__(self, block_size: int, levels: int) -> None:
        self._block_size, self._levels = block_size, levels
        self._debug = get_bool_env_var("SGLANG_DDTREE_DEBUG")
        self._agreements = AGREEMENTS

    def request(self, batch: ScheduleBatch) -> None:
        """What request validation keeps out; here a leak would be served wrongly and in silence.

        A refused request may be here: it is queued to be ended by its prefill's result, and under overlap the step
        after that prefill is launched before the result is looked at. Nobody is sent what that step makes of it.
        """
        if any(path_dependent(req) and not _ends(req) for req in batch.reqs):
            raise RuntimeError("DDTREE: a request with penalties reached the verify")
        if batch.has_grammar:
            raise RuntimeError("DDTREE: a request with a grammar reached the verify")

    def eager(self, runner: Any, bs: int, what: str) -> None:
        """A step ran without a graph: right where none was captured or the batch is larger than all of them."""
        largest = getattr(runner, "max_bs", None)
        if largest is not None and bs <= largest and hasattr(runner, "captured_req_width"):
            raise RuntimeError(
                f"DDTREE: the {what} of {bs} requests ran without a CUDA graph, though graphs reach to {largest}"
            )

    def trees(self, trees: DraftTrees, bonus: Tensor, verify_input: DDTreeVerifyInput, prefix_lens: Tensor) -> None:
        """The trees as they will be verified, and the mask as the kernel will read it."""
        if self._agreements and get_tp_group().world_size > 1:
            self._agreements -= 1
            self._ranks_agree(trees)
        if not self._debug:
            return
        parents, depths, nodes = trees.parents, trees.depths, torch.arange(trees.parents.shape[1], device=bonus.device)
        assert bool((parents[:, 1:] < nodes[1:]).all()) and bool((parents[:, 0] == 0).all()), "parent index >= child"
        assert bool((depths[:, 1:] == depths.gather(1, parents)[:, 1:] + 1).all()), "depths do not follow the parents"
        assert bool((depths[:, 0] == 0).all()) and int(depths.max()) <= self._levels, "a tree is too deep"
        assert bool((trees.tokens[:, 0] == bonus.view(-1)).all()), "a root is not the bonus token"
        pairs = parents[:, 1:] * (1 << 32) + trees.tokens[:, 1:]
        assert all(len(set(row)) == len(row) for row in pairs.tolist()), "two siblings hold the same token"
        wanted = (prefix_lens.long().unsqueeze(1) + depths).reshape(-1)
        assert bool((verify_input.positions == wanted).all()), "positions are not prefix + depth"
        found = read_mask(verify_input.custom_mask, prefix_lens.tolist(), len(nodes))
        assert bool((found == cells_of(parents, self._levels)).all()), "the mask is not the tree's"

    def accepted(self, accepted: Accepted, trees: DraftTrees) -> None:
        if self._debug:
            check_accepted(accepted, trees.depths, self._block_size)

    def _ranks_agree(self, trees: DraftTrees) -> None:
        group = get_tp_group()
        weights = torch.arange(1, trees.tokens.shape[1] + 1, device=trees.tokens.device) * 1_000_003
        mine = ((trees.tokens * 31 + trees.parents + 1) * weights).sum().view(1)
        everyone = mine.new_empty((group.world_size,))
        group.all_gather_into_tensor(everyone, mine)
        if len(set(everyone.tolist())) != 1:
            raise RuntimeError(f"DDTREE: tensor-parallel ranks built different trees, hashes {everyone.tolist()}")


def _ends(req: Req) -> bool:
    return req.to_finish is not None or req.finished()


def check_captured_mask(backend: Any) -> None:
    """While a target's graph is captured. Raises RuntimeError unless its kernels will read the tree mask's buffer."""
    mask, metadata = backend.verify_mask, backend.forward_metadata
    if mask is None or metadata.custom_mask is None:
        raise RuntimeError("DDTREE: the target's graphs would be captured without a tree mask")
    if metadata.custom_mask.data_ptr() != mask.buffer.data_ptr():
        raise RuntimeError("DDTREE: the target's graphs would read another buffer than the tree mask's")


def check_graphs(target: Any, draft: Any, width: int, block_size: int) -> None:
    """After capture. target, draft: ModelRunners. Raises RuntimeError for other widths than W and B, or one alone."""
    widths = {
        name: getattr(runner.decode_cuda_graph_runner, "captured_req_width", None)
        for name, runner in (("target", target), ("draft", draft))
    }
    for (name, captured), wanted in zip(widths.items(), (width, block_size), strict=True):
        if captured not in (None, wanted):
            raise RuntimeError(f"DDTREE: the {name}'s graphs are {captured} tokens a request wide, not {wanted}")
    if widths["target"] is not None and widths["draft"] is None:
        raise RuntimeError("DDTREE: the target has CUDA graphs and the draft has none")
