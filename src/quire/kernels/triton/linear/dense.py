"""Dense layers in Triton: floats, int8, and 4 or 8 bits in groups; and which layer weights are held by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from typing_extensions import override

from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.linear import quantization_of
from quire.kernels.layers.weights import (
    GroupedWeight,
    Int8Weight,
    Weight,
    dequantize,
    floats_of,
    quantize_int4,
    quantize_int8,
    with_tensors,
)
from quire.kernels.layers.weights import num_rows as num_weight_rows
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import is_interpreted, kernel_device
from quire.kernels.triton.linear.float8 import Float8Linear
from quire.kernels.triton.linear.products import grouped_linear_kernel, linear_kernel, quantize_rows_kernel
from quire.kernels.triton.linear.tiled import QUANTIZED_ROWS, ProductFormat, TiledLinear, tile_of
from quire.kernels.triton.linear.tma_products import can_fetch, multiply_fetched
from quire.kernels.triton.tensors import FLOAT_TYPES

_GROUP_MULTIPLE = 16  # of inputs that share a scale: what tensor cores multiply at least
_INT8_INPUTS = 32  # the least in int8
_MAX_RUN = 64  # inputs of a group that are multiplied at once
_MAX_QUANTIZED = 1 << 24  # weights that are quantized at once


class FloatLinear(TiledLinear):
    """Weights in one type, with which rows are multiplied in this type."""

    def __init__(
        self, parts: Sequence[Weight], bias: torch.Tensor | None, dtype: torch.dtype, memory: WeightMemory
    ) -> None:
        super().__init__(parts, bias)
        num_rows = sum(map(num_weight_rows, parts))
        weight = torch.empty(num_rows, self.in_features, dtype=dtype, device=kernel_device())
        # Part after part, so that the device never has all of them twice.
        for rows, part in zip(weight.split([*map(num_weight_rows, parts)]), parts, strict=True):
            rows.copy_(floats_of(on_kernel_device(part, memory)))
        self.tables = [weight]
        self.format = ProductFormat(dtype, _operands(dtype), tl.float32)

    @override
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        _multiply(self, rows.to(self.format.row_type), None, None, out, activation)


class Int8Linear(TiledLinear):
    """int8 weights, a scale per row of theirs, and rows that are quantized as they come, a scale for each.

    Sums are exact.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        super().__init__(parts, bias)
        quantized = [
            part if isinstance(part, Int8Weight) else quantize_int8(dequantize(part)) for part in parts
        ]
        weight = torch.cat([part.values for part in quantized])
        scales = torch.cat([part.scales.float() for part in quantized])
        self.tables = [weight, scales]
        self.format = ProductFormat(torch.int8, tl.int8, tl.int32)

    @override
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        values, scales = quantize_rows(rows)
        _multiply(self, values, scales, self.tables[1], out, activation)


class GroupedLinear(TiledLinear):
    """Weights of 4 or 8 bits in groups, packed; rows are made int8, a scale for each, or bfloat16.

    Raises:
        ValueError: there are no such groups in the kernels.
    """

    feature_dims = (0, 1, 1)

    def __init__(self, parts: Sequence[GroupedWeight], bias: torch.Tensor | None, activations: str) -> None:
        super().__init__(parts, bias)
        group_size = math.gcd(*(part.group_size for part in parts))
        if group_size < 1 or group_size % _GROUP_MULTIPLE or self.in_features % group_size:
            raise ValueError(
                f"{self.in_features} inputs are in groups of {group_size}; a group must have a multiple of "
                f"{_GROUP_MULTIPLE}, and groups be equal"
            )
        bits = 4 if all(part.bits == 4 for part in parts) else 8
        run = min(group_size & -group_size, _MAX_RUN)
        row_type = torch.int8 if activations == "int8" else torch.bfloat16
        is_exact = row_type == torch.int8 and run >= _INT8_INPUTS
        operands, sums = (tl.int8, tl.int32) if is_exact else (_operands(torch.bfloat16), tl.float32)
        self.format = ProductFormat(row_type, operands, sums, bits, group_size, run=run)
        values = torch.cat([part.values for part in parts])
        scales, zeros = (
            torch.cat([_widened(getattr(part, name), part.group_size // group_size) for part in parts])
            for name in ("scales", "zeros")
        )
        if bits == 8:  # as signed numbers, which is what is multiplied
            values, zeros = (values.to(torch.int16) - 128).to(torch.int8), zeros - 128
        else:
            values = pack_int4(values, run)
        self.tables = [values, scales.t().contiguous(), zeros.t().contiguous()]

    @override
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        row_scales = None
        if self.format.row_type == torch.int8:
            rows, row_scales = quantize_rows(rows)
        else:
            rows = rows.to(self.format.row_type)
        tile = tile_of(len(rows), self.in_features, self.out_features, torch.int8)
        grouped_linear_kernel[self.grid(len(rows), tile)](
            rows,
            row_scales,
            *self.tables,
            self.bias,
            out,
            len(rows),
            self.out_features,
            rows.stride(0),
            self.tables[0].stride(0),
            out.stride(0),
            IN_FEATURES=self.in_features,
            BITS=self.format.bits,
            GROUP=self.format.group_size,
            OPERANDS=self.format.operands,
            SUMS=self.format.sums,
            HAS_ROW_SCALES=row_scales is not None,
            HAS_BIAS=self.bias is not None,
            ACTIVATION=activation,
            FEATURES=tile.features,
            ROWS=tile.rows,
            INPUTS=self.format.run,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def linear(
    parts: Sequence[Weight],
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    quantization: str = "none",
    group_size: int = 128,
    int4_activations: str = "int8",
    memory: WeightMemory | None = None,
) -> TiledLinear:
    """Return the layer that `KernelSet.linear` describes; what is to be quantized is so on the device."""
    memory = memory or WeightMemory()
    kind = quantization_of(parts, quantization, group_size, has_float8=True)
    if kind == "none":
        return FloatLinear(parts, bias, dtype, memory)
    parts = [on_kernel_device(part, memory) for part in parts]
    if kind == "fp8":
        return Float8Linear(parts, bias)
    parts = [rows for part in parts for rows in _quantized_at_once(part)]
    if kind == "int8":
        return Int8Linear(parts, bias)
    grouped = [
        part if isinstance(part, GroupedWeight) else quantize_int4(dequantize(part), group_size)
        for part in parts
    ]
    return GroupedLinear(grouped, bias, int4_activations)


def _quantized_at_once(part: Weight) -> Sequence[Weight]:
    """Return rows in floating point in pieces, since quantizing takes several times their memory."""
    if not isinstance(part, torch.Tensor):
        return [part]
    return torch.split(part, max(1, _MAX_QUANTIZED // part.shape[1]))


def on_kernel_device(part: Weight, memory: WeightMemory) -> Weight:
    """Return rows of a matrix where the kernels are."""
    return with_tensors(part, lambda tensor: memory.bring(tensor, kernel_device()))


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [T, n] as int8 [T, n] and a scale for each, [T] float32."""
    num_rows, num_features = rows.shape
    values = rows.new_empty(rows.shape, dtype=torch.int8)
    scales = rows.new_empty(num_rows, dtype=torch.float32)
    quantize_rows_kernel[(-(-num_rows // QUANTIZED_ROWS),)](
        rows,
        values,
        scales,
        num_rows,
        num_features,
        rows.stride(0),
        ROWS=QUANTIZED_ROWS,
        BLOCK=next_power_of_2(num_features),
        num_warps=8,
    )
    return values, scales


def pack_int4(values: torch.Tensor, run: int) -> torch.Tensor:
    """Return values [rows, in] below 16 as bytes, [rows, in / 2] rounded up to whole runs.

    A byte has a value of one run of `run` inputs in its lower half, and one of the next run in the upper.
    """
    padded = F.pad(values, (0, -values.shape[1] % (2 * run)))
    low, high = padded.view(len(values), -1, 2, run).unbind(2)
    return (low | high << 4).flatten(1)


def _multiply(
    layer: FloatLinear | Int8Linear,
    rows: torch.Tensor,
    row_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
) -> None:
    weight = layer.tables[0]
    if can_fetch(rows, weight):
        multiply_fetched(layer, rows, row_scales, out, activation)
        return
    num_rows = rows.shape[0]
    tile = tile_of(num_rows, layer.in_features, layer.out_features, weight.dtype)
    linear_kernel[layer.grid(num_rows, tile)](
        rows,
        row_scales,
        weight,
        weight_scales,
        layer.bias,
        out,
        num_rows,
        layer.out_features,
        rows.stride(0),
        out.stride(0),
        IN_FEATURES=layer.in_features,
        OPERANDS=layer.format.operands,
        SUMS=layer.format.sums,
        HAS_SCALES=row_scales is not None,
        HAS_BIAS=layer.bias is not None,
        ACTIVATION=activation,
        FEATURES=tile.features,
        ROWS=tile.rows,
        INPUTS=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _operands(dtype: torch.dtype) -> Any:
    """Return the type in which such floats are multiplied; the interpreter takes bfloat16 for integers."""
    return tl.float32 if is_interpreted and dtype == torch.bfloat16 else FLOAT_TYPES[dtype]


def _widened(table: torch.Tensor, repeats: int) -> torch.Tensor:
    """Return [rows, groups] as float32, repeated for smaller groups."""
    return table.float().repeat_interleave(repeats, dim=1)
