"""Copies between every two GPUs, in both directions, and compares checksums that each side made of its own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .prelude import run, wrong

REPEATS = 3


def checksum(data: Tensor) -> int:
    """Depends on every value and on its place; whole numbers, so that it is the same on every device."""
    weights = torch.arange(1, data.numel() + 1, device=data.device, dtype=torch.int64) % 65_521 + 1
    return int((data.to(torch.int64) * weights).sum())


def copy(data: Tensor, device: str) -> Tensor:
    return data.to(device, copy=True)


def main(request: dict[str, Any], move: Callable[[Tensor, str], Tensor] = copy) -> dict[str, Any]:
    """``devices``: such as cuda:0; ``bytes`` of one copy."""
    devices, size = request["devices"], request["bytes"] // 4
    bad, tried = [], 0
    for one in devices:
        data = torch.randint(-(1 << 31), (1 << 31) - 1, (size,), generator=torch.Generator().manual_seed(7)).to(
            torch.int32
        )
        there = data.to(one)
        for other in devices:
            if other == one and len(devices) > 1:
                continue
            for _ in range(REPEATS):
                tried += 1
                came = move(there, other)
                differ = int((came.cpu() != data).sum())
                if checksum(came) != checksum(there) or differ:
                    bad.append(f"{one} -> {other}: {differ} of {size} words are wrong")
                    break
    if bad:
        return wrong("; ".join(bad[:8]), "copies that arrive as they were sent")
    return {"ok": True, "copies": tried, "bytes": request["bytes"]}


if __name__ == "__main__":
    run(main)
