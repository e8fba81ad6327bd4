"""Muon (K. Jordan, 2024) for weight matrices, AdamW for embeddings and norms, under one learning-rate scale."""

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(batch: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of [n, rows, cols], by five quintic Newton-Schulz steps in bfloat16."""
    x: Tensor = batch.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    out: Tensor = x.mT if tall else x
    return out


class Optimiser:
    """Steps every parameter of `net`; matrices outside the embedding by Muon, equal shapes batched together.

    Rates live on the device, so that a captured CUDA graph of `step` follows `set_scale`.
    """

    def __init__(
        self, net: nn.Module, muon_rate: float, adam_rate: float, decay: float, momentum: float = 0.95
    ) -> None:
        self.muon_rate, self.adam_rate, self.decay, self.momentum = muon_rate, adam_rate, decay, momentum
        self.matrices: dict[torch.Size, list[Tensor]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for name, weight in net.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                self.matrices[weight.shape].append(weight)
            else:
                rest.append(weight)
        device = rest[0].device
        self.state = {size: torch.zeros(len(same), *size, device=device) for size, same in self.matrices.items()}
        self.now = torch.zeros((), device=device)
        self.adam = torch.optim.AdamW(
            rest,
            lr=torch.zeros((), device=device),
            betas=(0.9, 0.97),
            weight_decay=0.0,
            fused=True,
            capturable=device.type == "cuda",
        )

    def set_scale(self, scale: float) -> None:
        """Both learning rates become `scale` times what they were made with."""
        self.now.fill_(self.muon_rate * scale)
        for group in self.adam.param_groups:
            group["lr"].fill_(self.adam_rate * scale)

    @torch.no_grad()
    def step(self) -> None:
        """One update; gradients are cleared."""
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for size, weights in self.matrices.items():
            grads = torch.stack([w.grad for w in weights if w.grad is not None])
            mean = self.state[size]
            mean.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(mean, self.momentum)).float()
            update *= self.now * -(max(1.0, size[0] / size[1]) ** 0.5)
            torch._foreach_mul_(weights, 1 - self.now * self.decay)
            torch._foreach_add_(weights, list(update.unbind()))
            for weight in weights:
                weight.grad = None
