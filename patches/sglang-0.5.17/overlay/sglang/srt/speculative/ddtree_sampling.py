"""Sampled verify: one token of the target after each node, drawn as SGLang draws it without speculation.

The sampler itself is asked, row by row: its filters, their order and its seeds are the server's own, whatever they are.
Then the walk is the greedy one: a draft is accepted where it is the token that was drawn after its parent, so what is
emitted is what was drawn, and its law is the target's, for a chain and for a tree. A seeded draw is fixed by the
request's seed and the position in the text; nodes at one depth share it, of which no more than one is on the path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

CHUNK_CELLS = 1 << 25
"""Logits drawn from at a time: the sampler's copies, up to four of 8 bytes a cell, stay near 1 GiB however many nodes
a batch has."""

PLAIN = "ddtree_budget"
"""In a request's ``custom_params``: 0 lets no draft of it be accepted."""


def sampled_nodes(sampler: Any, logits: Tensor, info: SamplingBatchInfo | None, positions: Tensor) -> Tensor:
    """The target's token after each node: int64 [bs * W].

    sampler: the target runner's ``Sampler``. logits: [bs * W, V], a request's nodes next to each other; left as they
    are. info: of the bs requests; None or all greedy takes the argmax. positions: int64 [bs * W], of each node in its
    text. Penalties, grammars and custom processors are not applied here.

    Tensor parallel: all ranks get what the first one drew. One whose draws fell otherwise, by rounding or by the state
    of its generator, would commit another number of tokens, and the next collective would never end. An argmax needs
    no such care: all ranks have the same logits.
    """
    if info is None or info.is_all_greedy:
        return torch.argmax(logits, dim=-1)
    rows = logits.shape[0]
    owners = torch.arange(len(info), device=logits.device).repeat_interleave(rows // len(info))
    step = max(1, CHUNK_CELLS // logits.shape[-1])
    drawn = [
        sampler(
            # a copy: the sampler turns it into probabilities in place
            LogitsProcessorOutput(next_token_logits=logits[begin : begin + step].clone()),
            _rows_of(info, owners[begin : begin + step]),
            False,
            [],
            [],
            positions[begin : begin + step],
        )
        for begin in range(0, rows, step)
    ]
    tokens = torch.cat(drawn).long()
    if get_parallel().tp_size > 1:
        get_tp_group().broadcast(tokens, src=0)
    return tokens


def _rows_of(info: SamplingBatchInfo, owners: Tensor) -> SamplingBatchInfo:
    """The parameters of the requests ``owners`` [n], a row each."""
    seeds = info.sampling_seed
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[owners],
        top_ps=info.top_ps[owners],
        top_ks=info.top_ks[owners],
        min_ps=info.min_ps[owners],
        sampling_seed=None if seeds is None else seeds[owners],
        # Not the sampler's: what would be applied before it, and what is one of a request and not of a node.
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        grammars=None,
        return_sampling_masks=None,
        has_custom_logit_processor=False,
    )


def plain_rows(reqs: Sequence[Req], device: torch.device | str) -> Tensor | None:
    """bool [bs]: the requests that asked for budget 0; None where none did. Does not wait for the device."""
    asked = [asked_budget(req) == 0 for req in reqs]
    if not any(asked):
        return None
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(asked, pin_memory=pinned).to(device, non_blocking=True)


def asked_budget(req: Req) -> Any:
    """What a request gives as its budget, or None."""
    given = req.sampling_params.custom_params
    return given.get(PLAIN) if isinstance(given, dict) else None
