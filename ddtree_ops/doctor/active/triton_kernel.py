"""Compiles a Triton kernel for the GPU and runs it: compiler, ptxas, launcher and driver in one."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore

from .prelude import run, wrong

SIZE = 4097  # no multiple of a block: the mask counts


@triton.jit  # type: ignore
def scale_and_add(x, y, out, factor, size, BLOCK: tl.constexpr):  # type: ignore
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out + at, tl.load(x + at, mask=inside) * factor + tl.load(y + at, mask=inside), mask=inside)


def main(request: dict[str, Any]) -> dict[str, Any]:
    """``devices``: such as cuda:0; under Triton's interpreter, cpu."""
    for device in request["devices"]:
        # Whole numbers: every sum is exact, whatever the GPU fuses.
        x = torch.arange(SIZE, device=device, dtype=torch.float32)
        y = torch.arange(SIZE, device=device, dtype=torch.float32).flip(0)
        out = torch.full((SIZE,), -1.0, device=device)
        scale_and_add[(triton.cdiv(SIZE, 256),)](x, y, out, 3.0, SIZE, BLOCK=256)
        differ = int((out.cpu() != 3.0 * x.cpu() + y.cpu()).sum())
        if differ:
            return wrong(f"{device}: {differ} of {SIZE} results are wrong", "all of them right")
    return {"ok": True, "devices": request["devices"], "triton": triton.__version__}


if __name__ == "__main__":
    run(main)
