"""The mixture of experts in place of a feed-forward layer, and which of them compute a token."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.kernels.layers.activations import sigmoid
from quire.kernels.layers.weights import Weight

CLAMPED_SWIGLU = "clamped_swiglu"
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of clamped_swiglu


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """What a mixture of experts is, beside its weights."""

    num_experts: int
    experts_per_token: int  # k
    normalize: bool  # a token's k weights are scaled to sum to 1
    activation: str  # as for `KernelSet.gated_activation`, or clamped_swiglu
    is_gated: bool = True  # the activation is that of a gate, which multiplies another product
    scoring: str = "softmax"
    """What makes weights of scores: softmax, sigmoid, or sparsemixer (Liu et al. 2023, as in Phi-3.5-MoE),
    where each of the best is weighed against those that are about as good.
    """
    jitter: float = 0.0  # of sparsemixer: half of the relative distance up to which an expert is as good
    correction: torch.Tensor | None = None  # [experts] float32, added to weights for the choice only
    num_groups: int = 1
    groups_per_token: int = 1
    """Only experts of the best groups are chosen: by softmax those with the best expert, by sigmoid those
    whose two best sum up to most.
    """
    scale: float = 1.0  # of the weights
    expert_scales: torch.Tensor | None = None  # [experts] float32, of each one's weights

    @property
    def is_plain(self) -> bool:
        """Whether experts are chosen by the softmax of their scores, and nothing else."""
        is_softmax = self.scoring == "softmax" and self.correction is None
        return is_softmax and self.num_groups == 1 and self.scale == 1.0 and self.expert_scales is None


class ExpertWeights(NamedTuple):
    """The matrices of one expert, each in parts as for `KernelSet.linear`; inputs may be in any order."""

    gate_up: Sequence[Weight]  # to 2 * size, gate first; without gates to size
    down: Sequence[Weight]
    gate_up_bias: torch.Tensor | None = None  # of its outputs, any floating-point type
    down_bias: torch.Tensor | None = None  # [hidden]


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
            scores: [T, experts], from the router.
            out: [T, hidden] in any floating-point type, for the result; None: a new tensor of the rows' type.
        """


def choose_experts(scores: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of each row's experts and their numbers, the best first: [T, k] float32 and int64.

    Args:
        scores: [T, experts], from the router.
        mixture: what they are scores of.
    """
    scores = scores.float()
    k = mixture.experts_per_token
    if mixture.scoring == "sparsemixer":
        return _sparsemixer(scores, k, mixture.jitter)
    if mixture.scoring == "sigmoid":
        likely = sigmoid(scores)
    else:
        likely = (scores - scores.amax(-1, keepdim=True)).exp()
    if mixture.is_plain:
        best, chosen = likely.topk(k, dim=-1)
        return best / sum_in_order(best if mixture.normalize else likely).unsqueeze(-1), chosen
    if mixture.scoring == "softmax":
        likely /= sum_in_order(likely).unsqueeze(-1)
    chosen = _corrected(likely, mixture).topk(k, dim=-1).indices
    best = likely.gather(-1, chosen)
    if mixture.normalize:
        best /= sum_in_order(best).unsqueeze(-1)
    if mixture.expert_scales is not None:
        best *= mixture.expert_scales[chosen]
    return best * mixture.scale, chosen


def _corrected(likely: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """Return what experts are chosen by; those of other groups have minus infinity."""
    corrected = likely if mixture.correction is None else likely + mixture.correction
    if mixture.num_groups == 1:
        return corrected
    groups = corrected.view(len(corrected), mixture.num_groups, -1)
    num_best = 1 if mixture.scoring == "softmax" else min(2, groups.shape[-1])
    of_groups = sum_in_order(groups.topk(num_best, dim=-1).values)
    best = of_groups.topk(mixture.groups_per_token, dim=-1).indices
    is_other = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, best, value=False)
    return groups.masked_fill(is_other.unsqueeze(-1), -math.inf).flatten(1)


def _sparsemixer(scores: torch.Tensor, k: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    left = scores
    weights, chosen = [], []
    for _ in range(k):
        top, index = left.max(dim=-1, keepdim=True)
        is_worse = (top - scores) / torch.maximum(scores.abs(), top) > 2 * jitter
        likely = (left.masked_fill(is_worse, -math.inf) - top).exp()
        weights.append(sum_in_order(likely).reciprocal().unsqueeze(-1))
        chosen.append(index)
        left = left.scatter(-1, index, -math.inf)
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


def sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension from first to last."""
    total = values[..., 0].clone()
    for index in range(1, values.shape[-1]):
        total += values[..., index]
    return total
