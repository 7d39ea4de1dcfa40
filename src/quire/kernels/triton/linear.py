"""Dense layers in Triton: floats, int8, and 4 or 8 bits in groups; and which layer weights are held by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from typing_extensions import override

from quire.kernels.linear import Linear, quantization_of
from quire.kernels.triton.device import is_interpreted, kernel_device
from quire.kernels.triton.float8_linear import Float8Linear
from quire.kernels.triton.products import grouped_linear_kernel, linear_kernel, quantize_rows_kernel
from quire.kernels.triton.tensors import FLOAT_TYPES
from quire.kernels.triton.tiled_linear import TiledLinear, tile_of
from quire.kernels.weights import GroupedWeight, Int8Weight, Weight, dequantize, quantize_int4, quantize_int8
from quire.kernels.weights import num_rows as num_weight_rows

_GROUP_MULTIPLE = 16  # of inputs that share a scale: the least that tensor cores multiply at once
_INT8_INPUTS = 32  # the least in int8
_MAX_RUN = 64  # inputs of a group that are multiplied at once
_QUANTIZED_ROWS = 16 if is_interpreted else 1  # of a program


class FloatLinear(TiledLinear):
    """Weights in one type, with which rows are multiplied in this type."""

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(parts, bias)
        num_rows = sum(map(num_weight_rows, parts))
        self._weight = torch.empty(num_rows, self.in_features, dtype=dtype, device=kernel_device())
        # Part after part, so that those of a mapped file go to the device without a copy of them all here.
        for rows, part in zip(self._weight.split([*map(num_weight_rows, parts)]), parts, strict=True):
            rows.copy_(_floats(part).to(dtype))

    @override
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        dtype = self._weight.dtype
        _multiply(self, rows.to(dtype), self._weight, out, operands=_operands(dtype), sums=tl.float32)


class Int8Linear(TiledLinear):
    """int8 weights, a scale per row of theirs, and rows that are quantized as they come, a scale for each.

    Sums are exact.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        super().__init__(parts, bias)
        quantized = [
            part if isinstance(part, Int8Weight) else quantize_int8(dequantize(part)) for part in parts
        ]
        self._weight = torch.cat([part.values for part in quantized]).to(kernel_device())
        self._scales = torch.cat([part.scales.float() for part in quantized]).to(kernel_device())

    @override
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        values, scales = quantize_rows(rows)
        _multiply(
            self, values, self._weight, out, operands=tl.int8, sums=tl.int32, scales=(scales, self._scales)
        )


class GroupedLinear(TiledLinear):
    """Weights of 4 or 8 bits in groups, packed; rows are made int8, a scale for each, or bfloat16.

    Raises:
        ValueError: there are no such groups in the kernels.
    """

    def __init__(self, parts: Sequence[GroupedWeight], bias: torch.Tensor | None, activations: str) -> None:
        super().__init__(parts, bias)
        group_size = math.gcd(*(part.group_size for part in parts))
        if group_size < 1 or group_size % _GROUP_MULTIPLE or self.in_features % group_size:
            raise ValueError(
                f"{self.in_features} inputs are in groups of {group_size}; a group must have a multiple of "
                f"{_GROUP_MULTIPLE}, and groups be equal"
            )
        self._bits = max(part.bits for part in parts)
        self._group_size = group_size
        self._run = min(group_size & -group_size, _MAX_RUN)
        self._has_int8_rows = activations == "int8"
        values = torch.cat([part.values for part in parts])
        scales, zeros = (
            torch.cat([_widened(getattr(part, name), part.group_size // group_size) for part in parts])
            for name in ("scales", "zeros")
        )
        if self._bits == 8:  # as signed numbers, which is what is multiplied
            values, zeros = (values.to(torch.int16) - 128).to(torch.int8), zeros - 128
        else:
            values = pack_int4(values, self._run)
        device = kernel_device()
        self._values = values.to(device)
        self._scales, self._zeros = (table.t().contiguous().to(device) for table in (scales, zeros))

    @override
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        scales = None
        if self._has_int8_rows:
            rows, scales = quantize_rows(rows)
        else:
            rows = rows.to(torch.bfloat16)
        is_exact = rows.dtype == torch.int8 and self._run >= _INT8_INPUTS
        tile = tile_of(len(rows), torch.int8)
        grouped_linear_kernel[self.grid(len(rows), tile)](
            rows,
            scales,
            self._values,
            self._scales,
            self._zeros,
            self.bias,
            out,
            len(rows),
            self.out_features,
            rows.stride(0),
            self._values.stride(0),
            out.stride(0),
            IN_FEATURES=self.in_features,
            BITS=self._bits,
            GROUP=self._group_size,
            OPERANDS=tl.int8 if is_exact else _operands(torch.bfloat16),
            SUMS=tl.int32 if is_exact else tl.float32,
            HAS_ROW_SCALES=scales is not None,
            HAS_BIAS=self.bias is not None,
            FEATURES=tile.features,
            ROWS=tile.rows,
            INPUTS=self._run,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def linear(
    parts: Sequence[Weight],
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    quantization: str,
    group_size: int,
    int4_activations: str,
) -> Linear:
    """Return the layer that `KernelSet.linear` describes."""
    kind = quantization_of(parts, quantization, group_size, has_float8=True)
    if kind == "fp8":
        return Float8Linear(parts, bias)
    if kind == "int8":
        return Int8Linear(parts, bias)
    if kind == "none":
        return FloatLinear(parts, bias, dtype)
    grouped = [
        part if isinstance(part, GroupedWeight) else quantize_int4(dequantize(part), group_size)
        for part in parts
    ]
    return GroupedLinear(grouped, bias, int4_activations)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [T, n] as int8 [T, n] and a scale for each, [T] float32."""
    num_rows, num_features = rows.shape
    values = rows.new_empty(rows.shape, dtype=torch.int8)
    scales = rows.new_empty(num_rows, dtype=torch.float32)
    quantize_rows_kernel[(triton.cdiv(num_rows, _QUANTIZED_ROWS),)](
        rows,
        values,
        scales,
        num_rows,
        num_features,
        rows.stride(0),
        ROWS=_QUANTIZED_ROWS,
        BLOCK=triton.next_power_of_2(num_features),
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
    layer: TiledLinear,
    rows: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    operands: Any,
    sums: Any,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    tile = tile_of(len(rows), weight.dtype)
    row_scales, weight_scales = (None, None) if scales is None else scales
    linear_kernel[layer.grid(len(rows), tile)](
        rows,
        row_scales,
        weight,
        weight_scales,
        layer.bias,
        out,
        len(rows),
        layer.out_features,
        rows.stride(0),
        out.stride(0),
        IN_FEATURES=layer.in_features,
        OPERANDS=operands,
        SUMS=sums,
        HAS_SCALES=scales is not None,
        HAS_BIAS=layer.bias is not None,
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
    """Return [rows, groups] as float32 for groups that are so many times smaller."""
    return table.float().repeat_interleave(repeats, dim=1)


def _floats(part: Weight) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else dequantize(part)
