"""Inside a tree's Python: the start-up canary over the toy target with attention that is right, or wrong in one way."""

from __future__ import annotations

from typing import Any

import torch

from .toy import HEAD_DIM, HEADS, VOCABULARY, Toy


def tree_of(width: int, levels: int) -> dict[str, Any]:
    from sglang.srt.speculative.ddtree_canary import canary_tree

    tree = canary_tree(width, levels, VOCABULARY)
    return {"parents": tree.parents, "depths": tree.depths, "tokens": tree.tokens, "twins": tree.twins}


def said(width: int, levels: int, requests: int, fault: str, bfloat16: bool = False) -> list[str]:
    """What the canary says of a server whose attention has this fault. "none", "noise" and "a token ruled out" are
    right ones."""
    from sglang.srt.speculative.ddtree_canary import canary_tree, run_canary

    tree, toy = canary_tree(width, levels, VOCABULARY), Toy(3)
    cells = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        cells[node] |= cells[tree.parents[node]]
    depths = torch.tensor(tree.depths)
    if fault == "causal":
        cells = torch.ones(width, width).tril().bool()
    elif fault == "all blocked":
        cells = torch.zeros_like(cells)
    elif fault == "by index":
        depths = torch.arange(width)
    noise = torch.Generator().manual_seed(1)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        logits = []
        for request, row in enumerate(tokens):
            prefix = 1 + 2 * request
            own = cells
            if fault == "second request" and request:
                own = cells.flatten().roll(prefix).view(width, width)

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                """A prefix of zeros, then the tree."""
                seen = torch.cat((torch.ones(width, prefix).bool(), own), dim=1)  # noqa: B023
                k, v = (torch.cat((x.new_zeros(prefix, *x.shape[1:]), x)) for x in (k, v))  # noqa: B023
                scores = torch.einsum("qhd,khd->hqk", q, k.expand(-1, HEADS, -1)) * HEAD_DIM**-0.5
                weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
                out = torch.einsum("hqk,khd->qhd", weights, v.expand(-1, HEADS, -1)).reshape(width, -1)
                return out.bfloat16().float() if bfloat16 else out

            rows = toy.forward(row, prefix + depths, attend).logits
            logits.append(rows.bfloat16().float() if bfloat16 else rows)
        out = torch.stack(logits)
        if fault == "not a number":
            out[0, 1, 0] = float("nan")
        elif fault == "a token ruled out":
            out[..., 0] = float("-inf")
        # runs of one graph differ where atomics add up
        return out + (1e-7 * torch.randn(out.shape, generator=noise) if fault == "noise" else 0.0)

    with torch.inference_mode():
        return run_canary(tree, requests, VOCABULARY, bfloat16, forward)
