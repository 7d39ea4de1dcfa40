"""Experts that are computed one after the other, those that any token has chosen, by the kernels' layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.act_order import linear_in_order
from quire.kernels.layers.experts import (
    CLAMPED_SWIGLU,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Experts,
    ExpertWeights,
    Mixture,
    choose_experts,
    sum_in_order,
)
from quire.kernels.layers.gated_linear import ActivatedLinear, GatedLinear
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
            gate_up, down = (
                linear_in_order(kernels, parts, bias, memory=memory, **options)
                for parts, bias in zip(expert[:2], expert[2:], strict=True)
            )
            if mixture.activation == CLAMPED_SWIGLU:
                gated: GatedLinear = _ClampedSwiGLU(kernels, gate_up, CLAMPED_SWIGLU)
            elif not mixture.is_gated:
                gated = ActivatedLinear(kernels, gate_up, mixture.activation)
            else:
                gated = kernels.gated_linear(gate_up, mixture.activation)
            self._experts.append(_Expert(gated, down))

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


class _ClampedSwiGLU(GatedLinear):
    """The activation of gpt-oss: `(up + 1) * gate * sigmoid(1.702 * gate)`, of what is cut at 7."""

    @override
    def __call__(
        self, rows: torch.Tensor, *, products: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate, up = self.gate_up(rows, out=products).float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        # Not torch's sigmoid, whose last few elements take another path with other roundings.
        gated = (up + 1.0).mul_(gate).div_(torch.exp(gate * -SWIGLU_ALPHA).add_(1.0))
        return gated.to(rows.dtype) if out is None else out.copy_(gated)


class _Expert(NamedTuple):
    gate_up: GatedLinear
    down: Linear
