"""SGLang's own verify kernel on the smallest tree that branches, against dense attention on the CPU.

The story of this project: a tree's mask was sized wrongly, nodes saw what they must not, and nothing crashed. So the
kernel of the release is given two requests of unlike length, a root with two branches of unlike depth, and compared
cell by cell; then one branch is changed and the other must not move by a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .prelude import run, wrong

#: root, two children of it, a child of the first; parents stand before children, as the kernel's causal clip needs
PARENTS = (-1, 0, 0, 1)
PREFIXES = (5, 37)
#: query heads, KV heads, width of keys, width of values: grouped queries, and MLA as Kimi and DeepSeek run it
SHAPES = ((4, 2, 64, 64), (8, 1, 576, 512))
TOLERANCE = {"float32": 8e-3, "bfloat16": 3e-2}
"""Released kernels multiply float32 as TF32, which keeps 3 bits more than bfloat16: 2.2e-3 apart on an H200."""

Kernel = Callable[..., None]


def tree_cells() -> Tensor:
    """bool [W, W]: a node sees itself and its ancestors."""
    width = len(PARENTS)
    cells = torch.zeros(width, width, dtype=torch.bool)
    for node in range(width):
        at = node
        while at >= 0:
            cells[node, at] = True
            at = PARENTS[at]
    return cells


class Case:
    """Two requests: q [2W, heads, d], the tree's own k and v [2W, kv, d], a pool with the prefixes of both."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> None:
        heads, kv, wide, value = shape
        maker = torch.Generator().manual_seed(seed)
        rows = len(PREFIXES) * len(PARENTS)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=maker).to(dtype)

        self.scale = 1.0 / math.sqrt(wide)
        self.q, self.k, self.v = normal(rows, heads, wide), normal(rows, kv, wide), normal(rows, kv, value)
        self.pool_k, self.pool_v = normal(64, kv, wide), normal(64, kv, value)
        # Slots of both prefixes are scattered over the pool, as a server's are.
        self.slots = torch.randperm(64, generator=maker)[: sum(PREFIXES)]

    def dense(self) -> Tensor:
        """float64 [2W, heads, d_v]: the oracle."""
        width, outputs, start = len(PARENTS), [], 0
        for request, prefix in enumerate(PREFIXES):
            own = slice(request * width, (request + 1) * width)
            slots = self.slots[start : start + prefix]
            start += prefix
            group = self.q.shape[1] // self.k.shape[1]
            keys = torch.cat((self.pool_k[slots], self.k[own])).double().repeat_interleave(group, dim=1)
            values = torch.cat((self.pool_v[slots], self.v[own])).double().repeat_interleave(group, dim=1)
            scores = torch.einsum("whd,nhd->hwn", self.q[own].double(), keys) * self.scale
            allowed = torch.cat((torch.ones(width, prefix, dtype=torch.bool), tree_cells()), dim=1)
            weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hwn,nhd->whd", weights, values))
        return torch.cat(outputs)

    def through(self, kernel: Kernel, device: str) -> Tensor:
        """The kernel's output, on the CPU."""
        width, count = len(PARENTS), len(PREFIXES)
        cells = [torch.cat((torch.ones(width, prefix, dtype=torch.bool), tree_cells()), 1) for prefix in PREFIXES]
        out = torch.full((*self.q.shape[:2], self.v.shape[2]), float("nan"), dtype=self.q.dtype, device=device)
        starts = torch.tensor([0, *(each.numel() for each in cells)]).cumsum(0)
        kernel(
            *(tensor.to(device) for tensor in (self.q, self.k, self.v)),
            out,
            self.pool_k.to(device),
            self.pool_v.to(device),
            (torch.arange(count + 1) * width).to(torch.int32).to(device),
            torch.tensor([0, *PREFIXES]).cumsum(0).to(torch.int32).to(device),
            self.slots.to(torch.int64).to(device),
            torch.cat([each.flatten() for each in cells]).to(device),
            True,
            starts.to(torch.int64).to(device),
            width,
            1.0,
            1.0,
            sm_scale=self.scale,
        )
        return out.cpu()


def judge(kernel: Kernel, device: str, dtype: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """Largest difference from the oracle, and whether a change on one branch moves the other."""
    case = Case(shape, getattr(torch, dtype), seed=20260101)
    before, oracle = case.through(kernel, device), case.dense()
    worst = float((before.double() - oracle).abs().nan_to_num(nan=float("inf")).max())
    if not worst <= TOLERANCE[dtype]:
        rows = (before.double() - oracle).abs().nan_to_num(nan=float("inf")).amax((1, 2)) > TOLERANCE[dtype]
        width = len(PARENTS)
        where = [f"request {int(row) // width} node {int(row) % width}" for row in rows.nonzero().flatten()]
        seen = f"{device} {dtype} {shape}: differs by {worst:.3g} at {', '.join(where)}"
        return wrong(seen, f"at most {TOLERANCE[dtype]:g} from dense attention under the tree's mask")
    changed = Case(shape, getattr(torch, dtype), seed=20260101)
    branch = 2  # the child of the root that has no children
    for request in range(len(PREFIXES)):
        changed.k[request * len(PARENTS) + branch] += 1
        changed.v[request * len(PARENTS) + branch] -= 1
    moved = (changed.through(kernel, device) != before).flatten(1).any(1).view(len(PREFIXES), -1)
    if bool(moved[:, [0, 1, 3]].any()):
        return wrong(
            f"{device} {dtype} {shape}: nodes of one branch saw the other", "branches that do not see one another"
        )
    if not bool(moved[:, branch].all()):
        return wrong(f"{device} {dtype} {shape}: a node did not see its own key", "a node that sees itself")
    return {"ok": True, "largest": worst}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """``devices``, ``dtypes``, ``shapes`` (None: all)."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd  # type: ignore

    figures = {}
    for device in request["devices"]:
        for dtype in request["dtypes"]:
            for shape in request.get("shapes") or SHAPES:
                told = judge(extend_attention_fwd, device, dtype, tuple(shape))
                if not told["ok"]:
                    return told
                figures[f"{device} {dtype} {shape[2]}"] = told["largest"]
    return {"ok": True, "largest": figures}


if __name__ == "__main__":
    run(main)
