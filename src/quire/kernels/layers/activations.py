"""Activations in plain torch, with the same bits for a number whatever the others are.

That rules out torch's fused `silu` and `gelu`, whose last few elements take a scalar path with other
roundings; `exp`, `tanh` and `erf` do not have one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def silu(values: torch.Tensor) -> torch.Tensor:
    """Return `x * sigmoid(x)` of a float32 tensor."""
    return values / torch.exp(-values).add_(1.0)


def gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of GELU (Hendrycks and Gimpel 2016) of a float32 tensor."""
    inner = (values * values * values).mul_(0.044715).add_(values).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(values).mul_(0.5)


def gelu(values: torch.Tensor) -> torch.Tensor:
    """Return the exact GELU of a float32 tensor."""
    return torch.erf(values * math.sqrt(0.5)).add_(1.0).mul_(values).mul_(0.5)


def relu2(values: torch.Tensor) -> torch.Tensor:
    """Return the square of what is positive (So et al. 2021, Primer) of a float32 tensor."""
    return values.clamp(min=0.0).square()


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu, "relu2": relu2}


def sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return the logistic function of a float32 tensor."""
    return torch.exp(-values).add_(1.0).reciprocal_()


class XIELU:
    """The activation of Huang and Schlag 2025 (xIELU), with numbers that were trained.

    Args:
        alpha_p, alpha_n: [1] float32, before softplus.
        beta, eps: float32 numbers.
    """

    def __init__(
        self, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
    ) -> None:
        self._positive = F.softplus(alpha_p)
        self._negative = beta + F.softplus(alpha_n)
        self._beta, self._eps = beta, eps

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return it of a float32 tensor."""
        positive = values * values * self._positive
        negative = (torch.expm1(torch.minimum(values, self._eps)) - values) * self._negative
        return torch.where(values > 0, positive, negative) + values * self._beta
