"""From arguments and model directories to a decoder that is ready to step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from .arguments import ArgumentError, Arguments
from .cache import PrefixCache
from .config import DraftConfig, ModelConfig, load_draft_config, load_target_config
from .drafter import Drafter
from .group import Group
from .kv import KVPool, SlotTable
from .ladder import parse_ladder
from .layers import WHOLE, Rotary, Share, build_layers
from .ranks import LeadingTrunk
from .step import Decoder, Draft
from .target import Target
from .tree import tree_width
from .trunk import Trunk
from .weights import digest, load_weights, target_shapes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DEFAULT_POOL_BYTES = 2 << 30


@dataclass(frozen=True)
class Resolved:
    """What the arguments came to once the models were read. `width` is W, the rows that a verify runs."""

    model: ModelConfig
    draft: DraftConfig | None
    context_length: int
    max_total_tokens: int
    num_draft_tokens: int | None
    width: int

    @property
    def slots(self) -> int:
        """KV slots of a pool, nobody's slot 0 included."""
        return self.max_total_tokens + 1

    @property
    def positions(self) -> int:
        """What bounds the RoPE positions of any row."""
        return self.context_length + max(self.width, self.draft.block_size if self.draft else 1)


def resolve(a: Arguments) -> Resolved:
    """Reads the configurations. Raises ConfigError, or ArgumentError where an argument contradicts a model."""
    model = load_target_config(a.model_path)
    context = a.context_length or model.max_positions
    if context > model.max_positions:
        raise ArgumentError(f"--context-length {context} exceeds the model's {model.max_positions}")
    _check_parts(a, model)
    draft, asked, width = None, None, 1
    if a.speculative_draft_model_path is not None:
        draft = load_draft_config(a.speculative_draft_model_path, model)
        asked = width = draft.block_size
        if a.speculative_ddtree_budget is not None and a.speculative_ddtree_topk is not None:
            if a.speculative_ddtree_topk > model.vocab_size:
                raise ArgumentError(
                    f"--speculative-ddtree-topk {a.speculative_ddtree_topk} exceeds the vocabulary, {model.vocab_size}"
                )
            asked = a.speculative_ddtree_budget + 1
            width = tree_width(draft.block_size - 1, a.speculative_ddtree_topk, a.speculative_ddtree_budget)
        elif a.speculative_num_draft_tokens not in (None, draft.block_size):
            raise ArgumentError(
                f"--speculative-num-draft-tokens {a.speculative_num_draft_tokens} is not block_size {draft.block_size}"
            )
    return Resolved(model, draft, context, _total_tokens(a, model, draft, context + width, width), asked, width)


def build_decoder(a: Arguments, resolved: Resolved, group: Group | None = None) -> Decoder:
    """Loads the weights; group: what rank 0 leads. Raises ConfigError where they are not the configuration's."""
    target, trunk = load_target(a, resolved, group)
    table = SlotTable(a.max_running_requests, resolved.context_length + resolved.width, resolved.slots)
    cache = PrefixCache(table, None if a.disable_radix_cache else a.page_size, a.fault)
    if resolved.draft is None or a.speculative_draft_model_path is None:
        return Decoder(target, cache, trunk)
    drafter = Drafter(
        a.speculative_draft_model_path, resolved.draft, target, slots=resolved.slots, positions=resolved.positions
    )
    rejection = a.speculative_sampling == "rejection"
    budget = a.speculative_ddtree_budget
    ladder = () if budget is None else parse_ladder(a.speculative_ddtree_ladder, budget)
    draft = Draft(budget, a.speculative_ddtree_topk or 1, rejection, ladder)
    return Decoder(target, cache, trunk, drafter, draft, a.fault)


def load_target(a: Arguments, resolved: Resolved, group: Group | None = None) -> tuple[Target, Trunk]:
    """The target, its layers being this rank's share of a group that need not have formed yet. Raises ConfigError."""
    dtype, share = DTYPES[a.dtype], WHOLE if group is None else Share(group.rank, group.size, group.join)
    weights = load_weights(a.model_path, target_shapes(resolved.model), dtype)
    layers = build_layers(resolved.model, weights, "model.", share)
    rotary = Rotary(resolved.model, resolved.positions)
    pool = KVPool(share.config(resolved.model), resolved.slots, dtype)
    leads = group is not None and group.rank == 0
    trunk = LeadingTrunk(layers, rotary, pool, group) if group and leads else Trunk(layers, rotary, pool)
    return Target(resolved.model, weights, dtype), trunk


def identity(a: Arguments, resolved: Resolved) -> bytes:
    """SHA-256 over what all ranks must have alike to compute parts of one thing. Raises ConfigError."""
    alike = (resolved.model, a.dtype, resolved.slots, resolved.positions, digest(a.model_path))
    return hashlib.sha256(repr(alike).encode()).digest()


def _check_parts(a: Arguments, model: ModelConfig) -> None:
    for name, size in (
        ("num_attention_heads", model.num_heads),
        ("num_key_value_heads", model.num_kv_heads),
        ("intermediate_size", model.intermediate_size),
    ):
        if size % a.nnodes:
            raise ArgumentError(f"--nnodes {a.nnodes} does not divide the model's {name}, {size}")


def _total_tokens(a: Arguments, model: ModelConfig, draft: DraftConfig | None, row: int, width: int) -> int:
    if a.max_total_tokens is not None:
        if a.max_total_tokens < width + 2:
            raise ArgumentError(f"--max-total-tokens {a.max_total_tokens} cannot hold one verify of {width} rows")
        return a.max_total_tokens
    stacks = [model] + ([draft.model] if draft else [])
    size = sum(2 * m.num_layers * m.num_kv_heads * m.head_dim for m in stacks) * DTYPES[a.dtype].itemsize
    return max(row, min(a.max_running_requests * row, _DEFAULT_POOL_BYTES // size))
