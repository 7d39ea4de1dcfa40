"""Dense layers whose outputs are gates and what these are multiplied with."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from quire.kernels.layers.linear import Linear

if TYPE_CHECKING:
    from quire.kernels.interface import KernelSet


class GatedLinear:
    """The gated activation of a layer's products: [T, in_features] to [T, n].

    Args:
        kernels: compute it.
        gate_up: to 2 * n outputs, gate first.
        activation: as for `KernelSet.gated_activation`.
    """

    keeps_products = True
    """Whether the products themselves take memory."""

    def __init__(self, kernels: KernelSet, gate_up: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self._kernels = kernels
        self._activation = activation

    @property
    def kind(self) -> Hashable:
        """See `Linear.kind`."""
        return type(self), self.gate_up.kind

    def __call__(
        self, rows: torch.Tensor, *, products: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `activation(gate) * up` of rows [T, in_features].

        Args:
            rows: as for `Linear`.
            products: [T, 2 * n] for those of `gate_up`; None: new memory. Not used unless `keeps_products`.
            out: [T, n], where to put the result; None: a new tensor of the rows' type.
        """
        return self._kernels.gated_activation(self.gate_up(rows, out=products), self._activation, out=out)


class ScaledGateLinear(GatedLinear):
    """A gated activation whose gates are multiplied by a number first.

    Args:
        kernels, gate_up, activation: as for `GatedLinear`.
        scale: the number.
    """

    def __init__(self, kernels: KernelSet, gate_up: Linear, activation: str, scale: float) -> None:
        super().__init__(kernels, gate_up, activation)
        self._scale = scale

    @override
    def __call__(
        self, rows: torch.Tensor, *, products: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up = self.gate_up(rows, out=products)
        gate_up[:, : gate_up.shape[1] // 2].mul_(self._scale)
        return self._kernels.gated_activation(gate_up, self._activation, out=out)


class ActivatedLinear(GatedLinear):
    """The activation of a layer's products, without gates: [T, in_features] to [T, n].

    Args:
        kernels: compute it.
        up: to n outputs.
        activation: as for `KernelSet.activation`, or a function of float32 numbers.
    """

    keeps_products = False

    def __init__(
        self, kernels: KernelSet, up: Linear, activation: str | Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(kernels, up, activation if isinstance(activation, str) else "")
        self._function = None if isinstance(activation, str) else activation

    @override
    def __call__(
        self, rows: torch.Tensor, *, products: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = self.gate_up(rows, out=out)
        if self._function is not None:
            return result.copy_(self._function(result.float()))
        return self._kernels.activation(result, self._activation, out=result)
