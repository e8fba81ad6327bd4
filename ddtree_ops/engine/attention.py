"""How rows see keys: whole prompts causally, a verify through the tree mask, a draft block without any order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .kv import KVPool


def prefix_allowed(lengths: Tensor, columns: int) -> Tensor:
    """bool [batch, columns]: which of the padded prefix columns are a request's own (lengths int64 [batch])."""
    return torch.arange(columns) < lengths.unsqueeze(1)


def _grouped(query: Tensor, batch: int, kv_heads: int) -> Tensor:
    """[batch * rows, heads, d] -> [batch, kv_heads, rows * group, d]: heads that share keys become query rows.

    That way a kv head is read once and never repeated; column masks repeat each row `group` times.
    """
    total, heads, size = query.shape
    shaped = query.view(batch, total // batch, kv_heads, heads // kv_heads, size)
    return shaped.permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, size)


def _ungrouped(mixed: Tensor, rows: int) -> Tensor:
    batch, kv_heads, both, size = mixed.shape
    shaped = mixed.view(batch, kv_heads, rows, both // rows, size)
    return shaped.permute(0, 2, 1, 3, 4).reshape(batch * rows, -1)


def _bias(allowed: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """bool [batch, rows, columns] -> additive [batch, 1, rows * group, columns]."""
    bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))
    return bias.repeat_interleave(group, dim=1).unsqueeze(1)


class PromptAttention:
    """Causal attention inside each of the concatenated prompts and to its cached prefix; also stores their KV.

    No mask buffer, no draft.
    """

    def __init__(self, pool: KVPool, slots: Tensor, lengths: list[int], cached: list[Tensor]) -> None:
        """slots int64 [rows]: where row t's KV goes; lengths: rows of each prompt, in order; cached: slots before."""
        self._pool, self._slots, self._lengths, self._cached = pool, slots, lengths, cached

    def __call__(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        self._pool.write(layer, self._slots, kv)
        outputs = []
        parts = zip(torch.split(query, self._lengths), torch.split(kv, self._lengths), self._cached, strict=True)
        for q, own, before in parts:
            keys, values = own.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
            allowed = None
            if before.numel():
                first = self._pool.read(layer, before.unsqueeze(0))
                keys, values = torch.cat((first[0], keys), dim=2), torch.cat((first[1], values), dim=2)
                allowed = torch.ones(q.shape[0], keys.shape[2], dtype=torch.bool).tril(before.numel())
            mixed = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=allowed,
                is_causal=allowed is None,
                enable_gqa=True,
            )
            outputs.append(mixed.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1))
        return torch.cat(outputs)


class VerifyAttention:
    """W rows a request over its prefix and, as the tree mask says, over one another; stores the rows' KV first."""

    def __init__(
        self, pool: KVPool, heads: tuple[int, int], prefix: Tensor, nodes: Tensor, allowed: Tensor, dtype: torch.dtype
    ) -> None:
        """heads (query, kv); prefix [batch, P] and nodes [batch, W] slots; allowed bool [batch, W, P + W]."""
        self._pool, self._kv_heads, self._nodes = pool, heads[1], nodes.reshape(-1)
        self._columns = torch.cat((prefix, nodes), dim=1)
        self._bias = _bias(allowed, heads[0] // heads[1], dtype)

    def __call__(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        self._pool.write(layer, self._nodes, kv)
        keys, values = self._pool.read(layer, self._columns)
        batch = self._columns.shape[0]
        mixed = F.scaled_dot_product_attention(
            _grouped(query, batch, self._kv_heads), keys, values, attn_mask=self._bias
        )
        return _ungrouped(mixed, query.shape[0] // batch)


class BlockAttention:
    """Every row of a draft block over the whole context and the whole block, non-causally; stores nothing."""

    def __init__(self, pool: KVPool, heads: tuple[int, int], context: Tensor, lengths: Tensor, block: int) -> None:
        """heads (query, kv); context [batch, P] slots, the first lengths [batch] count; block: rows a request."""
        self._pool, self._kv_heads, self._context = pool, heads[1], context
        batch, columns = context.shape
        allowed = torch.ones(batch, 1, columns + block, dtype=torch.bool)
        allowed[:, 0, :columns] = prefix_allowed(lengths, columns)
        self._allowed = allowed.unsqueeze(1)

    def __call__(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        batch = self._context.shape[0]
        keys, values = self._pool.read(layer, self._context)
        own = kv.view(batch, -1, *kv.shape[1:]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            _grouped(query, batch, self._kv_heads),
            torch.cat((keys, own[:, : self._kv_heads]), dim=2),
            torch.cat((values, own[:, self._kv_heads :]), dim=2),
            attn_mask=self._allowed,
        )
        return _ungrouped(mixed, query.shape[0] // batch)
