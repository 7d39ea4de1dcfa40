"""The Muon optimizer, computed in float32.

`torch.optim.Muon` orthogonalizes in bfloat16, which takes twenty times as long on processors without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalized, for matrices (Jordan et al. 2024, "Muon").

    Args:
        params: matrices.
        lr: learning rate.
        momentum: share of the old momentum that is kept at each step, with a look ahead (Nesterov).
        weight_decay: share of a weight, times the learning rate, that each step takes away.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all matrices once."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(state["momentum"], group["momentum"]))
                scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values of about one, by Newton-Schulz iterations of degree five."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
