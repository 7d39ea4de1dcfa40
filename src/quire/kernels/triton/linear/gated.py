"""Dense layers in Triton whose products are gated before they are stored, if they are of many rows."""

from __future__ import annotations

import torch
from typing_extensions import override

from quire.kernels.interface import KernelSet
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.linear import Linear
from quire.kernels.triton.linear.tiled import TiledLinear
from quire.kernels.triton.rows import FEATURES_BY_TURNS, check_activation, gated_activation

MOST_ROWS_APART = 64
"""The most rows whose products are stored, and then gated by a kernel of their own. On an H200, steps of few
rows take less time so; probably because all multiprocessors run empty before the next layer begins, whose few
programs are spread evenly then."""


class FusedGatedLinear(GatedLinear):
    """Takes a layer for which `can_fuse` is true, and changes it: it must not be called by others."""

    keeps_products = False
    gate_up: TiledLinear

    def __init__(self, kernels: KernelSet, gate_up: TiledLinear, activation: str) -> None:
        super().__init__(kernels, gate_up, activation)
        check_activation(activation)
        dims = gate_up.feature_dims[: len(gate_up.tables)]
        gate_up.tables = [_by_turns(table, dim) for table, dim in zip(gate_up.tables, dims, strict=True)]
        if gate_up.bias is not None:
            gate_up.bias = _by_turns(gate_up.bias, 0)
        gate_up.descriptors.clear()

    @override
    def __call__(
        self, rows: torch.Tensor, *, products: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if len(rows) > MOST_ROWS_APART:
            return self.gate_up.gated(rows, self._activation, out=out)
        return gated_activation(self.gate_up(rows), self._activation, out=out, by_turns=True)


def gated_linear(kernels: KernelSet, gate_up: Linear, activation: str) -> GatedLinear:
    """Do what `KernelSet.gated_linear` says."""
    if isinstance(gate_up, TiledLinear) and can_fuse(gate_up):
        return FusedGatedLinear(kernels, gate_up, activation)
    return GatedLinear(kernels, gate_up, activation)


def can_fuse(gate_up: TiledLinear) -> bool:
    """Return whether gates and others can take turns: blocks of several features share no scale."""
    return gate_up.out_features % (2 * FEATURES_BY_TURNS) == 0 and gate_up.format.block_features <= 1


def _by_turns(table: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a table whose features along `dim` are of its first half and of its second by turns."""
    before, after = table.shape[:dim], table.shape[dim + 1 :]
    halves = table.reshape(*before, 2, -1, FEATURES_BY_TURNS, *after)
    return halves.transpose(dim, dim + 1).reshape(table.shape)
