"""What the dense layers have in common: tiles of products, what is checked of a call, gates of products."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from typing_extensions import override

from quire.kernels.interface import KernelSet
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.linear import Linear
from quire.kernels.layers.weights import Weight
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import has_large_tiles, is_interpreted, kernel_device
from quire.kernels.triton.rows import FEATURES_BY_TURNS, check_activation, gated_activation
from quire.kernels.triton.tensors import check_rows

_MAX_INPUTS = 1 << 17  # int8 sums of more could overflow
_MANY_FEATURES = 1 << 14  # that fill the GPU with programs
_MANY_INPUTS = 1 << 11
QUANTIZED_ROWS = 16 if is_interpreted else 1  # of a program that quantizes rows

MAX_ROWS_APART = 64
"""The most rows whose products are stored, and then gated by a kernel of their own. On an H200, steps of few
rows take less time so; probably because all multiprocessors run empty before the next layer begins, whose few
programs are spread evenly then."""


@dataclasses.dataclass(slots=True, frozen=True)
class Tile:
    """What a program of a product computes, and with what."""

    features: int
    rows: int
    inputs: int  # that are multiplied at once
    num_warps: int
    num_stages: int


def tile_of(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> Tile:
    """Return the tile of products of `num_rows` rows, with weights of this type.

    Features are at least 64, so that Hopper multiplies all numbers of rows with one kind of instruction. How
    many inputs are multiplied at once depends on the type only, but for floats of two bytes: Hopper adds up
    their products one run of 16 after the other. Measured on an H200 with the layers of Qwen3-0.6B and
    Llama-3-8B. The interpreter does best with few programs; it multiplies in numpy, where rows have the same
    bits at every place among 16, but not among more.
    """
    if is_interpreted:
        return Tile(512, 16, 128, 4, 1)
    if num_rows <= 16 and dtype.itemsize == 2 and has_large_tiles():
        if out_features >= _MANY_FEATURES:
            return Tile(64, 16, 128, 4, 4)
        return Tile(64, 16, 256, 4, 4) if in_features >= _MANY_INPUTS else Tile(64, 16, 128, 4, 6)
    inputs = 32 if dtype == torch.float32 else 64 if dtype.itemsize == 2 else 128
    if num_rows <= 64:
        return Tile(64, max(next_power_of_2(num_rows), 16), inputs, 4, 5)
    return Tile(128, 128, inputs, 8, 3)


@dataclasses.dataclass(slots=True, frozen=True)
class ProductFormat:
    """How rows are multiplied with the weights of a layer, as far as kernels are compiled for it."""

    row_type: torch.dtype  # that rows are made first; int8 and float8 have scales
    operands: Any  # the type that is multiplied
    sums: Any  # the type of sums
    bits: int = 0  # of weights in groups; 0: others
    group_size: int = 0  # inputs that share a scale; 0: all
    block_features: int = 0  # outputs that share a scale, of float8; 0: others
    run: int = 0  # inputs that are multiplied at once; 0: as many as a tile has


class TiledLinear(Linear):
    """A layer in the device's memory, called with rows that are there, too."""

    format: ProductFormat
    tables: list[torch.Tensor]
    """The weights [out, in] as they are held; then their scales and zeros, if they have any."""

    feature_dims: tuple[int, ...] = (0, 0)
    """The dimension of each table that is the outputs'."""

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        super().__init__(parts, bias)
        if not 1 <= self.in_features <= _MAX_INPUTS:
            raise ValueError(
                f"a layer has {self.in_features} input features; 1 to {_MAX_INPUTS} are supported"
            )
        self.descriptors: dict[tuple[int, int], Any] = {}  # of the weights, by what is fetched at once
        if self.bias is not None:
            self.bias = self.bias.to(kernel_device()).contiguous()

    @property
    @override
    def kind(self) -> Hashable:
        return super().kind, self.format, self.bias is None

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._computed(rows, out, self.out_features, activation="")

    def gated(self, rows: torch.Tensor, activation: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gated activations [T, out_features / 2] of outputs by turns, see `gated_linear`.

        Outputs are rounded to the type of `out` before, which must be that of the rows.
        """
        if out is not None and out.dtype is not rows.dtype:
            raise TypeError(f"out is {out.dtype}; it must be {rows.dtype}, as the rows are")
        return self._computed(rows, out, self.out_features // 2, activation)

    def _computed(
        self, rows: torch.Tensor, out: torch.Tensor | None, num_results: int, activation: str
    ) -> torch.Tensor:
        check_rows("rows", rows)
        shape = rows.shape[0], num_results
        if out is None:
            out = rows.new_empty(shape)
        check_rows("out", out)
        if rows.shape[1] != self.in_features or out.shape != shape:
            raise ValueError(
                f"rows are {list(rows.shape)} and out is {list(out.shape)}; the layer takes "
                f"{self.in_features} features to {shape[1]}"
            )
        if shape[0]:
            self._multiply(rows, out, activation)
        return out

    @abstractmethod
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        """Write the products of at least one row to `out`, or with an `activation` what these become."""

    def grid(self, num_rows: int, tile: Tile) -> tuple[int, int]:
        """Return how many programs compute the products of these rows: by features, by rows."""
        return -(-self.out_features // tile.features), -(-num_rows // tile.rows)


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
        if len(rows) > MAX_ROWS_APART:
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
