"""The mixture of experts in place of a feed-forward layer (Mixtral, Qwen3-MoE)."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.kernels.layers.weights import Weight


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """What a mixture of experts is, beside its weights."""

    num_experts: int
    experts_per_token: int  # k
    normalize: bool  # a token's k weights are scaled to sum to 1
    activation: str  # as for `KernelSet.gated_activation`


class ExpertWeights(NamedTuple):
    """The matrices of one expert, each in parts as for `KernelSet.linear`; inputs may be in any order."""

    gate_up: Sequence[Weight]  # to 2 * size, gate first
    down: Sequence[Weight]


class Experts(ABC):
    """All experts of a layer, held as its kernels compute them."""

    @abstractmethod
    def __call__(
        self, rows: torch.Tensor, scores: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's best experts, added from the best to the least in float32.

        That order is the row's own, so its bits do not depend on the other rows.

        Args:
            rows: [T, hidden].
            scores: [T, experts], from the router; their softmax has the weights.
            out: [T, hidden] in any floating-point type, for the result; None: a new tensor of the rows' type.
        """
