"""Experts that are computed one after the other, those that any token has chosen, by the kernels' layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.act_order import linear_in_order
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture, choose_experts, sum_in_order
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.linear import Linear

if TYPE_CHECKING:
    from quire.kernels.interface import KernelSet


class ExpertByExpert(Experts):
    """Waits for the device to learn which experts tokens have chosen.

    Args:
        weights: those of each expert.
        mixture: what to compute.
        kernels: make the layers.
        memory: where packed weights go; None: memory of each layer's own.
        options: the other ones of `KernelSet.linear`.
    """

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        mixture: Mixture,
        kernels: KernelSet,
        *,
        memory: WeightMemory | None = None,
        **options: Any,
    ) -> None:
        memory = memory or WeightMemory()
        self._mixture = mixture
        self._experts = []
        for expert in weights:
            gate_up, down = (linear_in_order(kernels, parts, memory=memory, **options) for parts in expert)
            self._experts.append(_Expert(kernels.gated_linear(gate_up, mixture.activation), down))

    @override
    def __call__(
        self, rows: torch.Tensor, scores: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights, chosen = choose_experts(scores, self._mixture)
        outputs = torch.empty(*chosen.shape, rows.shape[-1], device=rows.device)  # [T, k, hidden] float32
        for number in sorted(set(chosen.flatten().tolist())):
            token, rank = torch.where(chosen == number)
            expert = self._experts[number]
            outputs[token, rank] = expert.down(expert.gate_up(rows[token])).float()
        weighted = outputs.mul_(weights.unsqueeze(-1))
        result = sum_in_order(weighted.transpose(1, 2))
        return result.to(rows.dtype) if out is None else out.copy_(result)


class _Expert(NamedTuple):
    gate_up: GatedLinear
    down: Linear
