"""Dense layers in float8 (e4m3): weights with a scale for each row or block, and rows quantized as they come.

Method: DeepSeek-V3 (2024), section 3.3: scales of 128 inputs of a row and of 128 x 128 weights, and sums that
leave the tensor cores after 128 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from typing_extensions import override

from quire.errors import ConfigError
from quire.kernels.bounds import FLOAT8_INPUTS
from quire.kernels.layers.weights import Float8Weight, Weight, floats_of, scales_of_blocks
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import compute_capability, is_interpreted, kernel_device
from quire.kernels.triton.linear.float8_products import float8_linear_kernel, quantize_float8_kernel
from quire.kernels.triton.linear.tiled import QUANTIZED_ROWS, ProductFormat, TiledLinear, tile_of
from quire.kernels.triton.linear.tma_products import can_fetch, multiply_fetched

_MIN_CAPABILITY = 89  # of GPUs: that of Ada
_MAX_GROUP = 128  # inputs that are multiplied at once
_OPERANDS = tl.float32 if is_interpreted else tl.float8e4nv


class Float8Linear(TiledLinear):
    """float8 weights, and rows that are quantized as they come.

    With a scale for each row of weights, rows have one scale; with a scale for each block, they have one for
    as many inputs as a block has, but at most 128.

    Raises:
        ValueError: there are no such blocks in the kernels.
        ConfigError: the GPU does not multiply float8.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        super().__init__(parts, bias)
        _check_device()
        held = [_on_device(part) for part in parts]
        block, is_in_groups = _common_block(held, self.in_features)
        weight = torch.cat([part.values for part in held])
        self.tables = [weight, torch.cat([scales_of_blocks(part, block) for part in held])]
        group = block[1] if is_in_groups else 0
        self.format = ProductFormat(
            weight.dtype, _OPERANDS, tl.float32, group_size=group, block_features=block[0], run=group
        )

    @override
    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        values, scales = quantize_float8_rows(rows, self.format.group_size or self.in_features)
        if can_fetch(values, self.tables[0]):
            multiply_fetched(self, values, scales, out, activation)
            return
        tile = tile_of(len(rows), self.in_features, self.out_features, values.dtype)
        float8_linear_kernel[self.grid(len(rows), tile)](
            values,
            scales,
            *self.tables,
            self.bias,
            out,
            len(rows),
            self.out_features,
            out.stride(0),
            IN_FEATURES=self.in_features,
            BLOCK_FEATURES=self.format.block_features,
            IN_GROUPS=self.format.group_size > 0,
            OPERANDS=_OPERANDS,
            HAS_BIAS=self.bias is not None,
            ACTIVATION=activation,
            FEATURES=tile.features,
            ROWS=tile.rows,
            INPUTS=self.format.run or tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def quantize_float8_rows(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [T, n] as float8 [T, n], and a scale for each `group` of features, [groups, T] float32.

    `group` is a power of two, or n.
    """
    num_rows, num_features = rows.shape
    num_groups = -(-num_features // group)
    values = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty((num_groups, num_rows), dtype=torch.float32)
    quantize_float8_kernel[(-(-num_rows // QUANTIZED_ROWS),)](
        rows,
        values,
        scales,
        num_rows,
        num_features,
        rows.stride(0),
        ROWS=QUANTIZED_ROWS,
        GROUPS=next_power_of_2(num_groups),
        GROUP=next_power_of_2(group),
        num_warps=8,
    )
    return values, scales


def _on_device(part: Weight) -> Float8Weight:
    """Return a part as it is multiplied: if it is not in float8, with a scale for each row."""
    device = kernel_device()
    if isinstance(part, Float8Weight):
        return Float8Weight(part.values.to(device), part.scales.to(device), part.block)
    floats = floats_of(part).to(device)
    num_features = floats.shape[1]
    values, scales = quantize_float8_rows(floats, num_features)
    return Float8Weight(values, scales.t(), (1, num_features))


def _check_device() -> None:
    capability = compute_capability()
    if capability < _MIN_CAPABILITY:
        raise ConfigError(
            f"weights are in float8, which GPUs multiply from compute capability {_MIN_CAPABILITY / 10} "
            f"on, and this one has {capability / 10}; set EngineConfig.quantization to 'int8', or "
            "EngineConfig.device to 'cpu' if the checkpoint is in float8"
        )


def _common_block(parts: Sequence[Float8Weight], in_features: int) -> tuple[tuple[int, int], bool]:
    """Return the block that those of all parts consist of, and whether inputs are in several groups."""
    groups = [part.block[1] for part in parts if part.scales.shape[1] > 1]
    if not groups:
        return (1, in_features), False
    group = math.gcd(_MAX_GROUP, *groups)
    if group % FLOAT8_INPUTS:
        raise ValueError(
            f"float8 weights are in groups of {group} inputs; a group must have a multiple of {FLOAT8_INPUTS}"
        )
    starts = [len(part.values) for part in parts[:-1]]
    return (math.gcd(*(part.block[0] for part in parts), *starts), group), True
