"""Matrices in the formats of the compressed-tensors library.

Layout: https://github.com/vllm-project/compressed-tensors, formats int-quantized, float-quantized,
naive-quantized and pack-quantized. Scales of activations that were fixed in advance (`input_scale`) are not
used: Quire's are those of each token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from quire.kernels.layers.weights import Int8Weight, Weight
from quire.models.checkpoints.quantized.description import Block, block_of
from quire.models.checkpoints.quantized.float8 import decode_float8
from quire.models.checkpoints.quantized.matrices import (
    MatrixFormat,
    Parts,
    Shape,
    grouped,
    packed_bits,
    require_shape,
    scales_of,
    unpack,
)

_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")


def _decode_plain(parts: Parts, shape: Shape, *, blocks: Sequence[Block | None]) -> Weight:
    """A number for each weight: float8_e4m3fn, or int8."""
    values = parts["weight"]
    if values.dtype == torch.int8:
        return _decode_int(parts, shape)
    if values.dtype != torch.float8_e4m3fn:
        raise ValueError(f"its weight is stored as {values.dtype}; only int8 and float8_e4m3fn are supported")
    if "weight_zero_point" in parts and bool(parts["weight_zero_point"].any()):
        raise ValueError("its weight is stored as float8 and has a weight_zero_point")
    block = block_of(blocks, parts["weight_scale"].shape, shape[0])
    return decode_float8(parts, shape, scale="weight_scale", block=block)


def _decode_int(parts: Parts, shape: Shape) -> Weight:
    """int8 [out, in]; a scale for the matrix ([1] or []), each row [out, 1] or each group [out, groups]."""
    require_shape(parts, "weight", shape)
    values = parts["weight"]
    scales = _by_row(scales_of(parts, "weight_scale"), shape[0])
    zeros = parts.get("weight_zero_point")
    if scales.shape[1] == 1 and (zeros is None or not zeros.any()):
        return Int8Weight(values, scales[:, 0])
    steps = torch.zeros_like(scales) if zeros is None else _by_row(zeros.float(), shape[0])
    return grouped(values.view(torch.uint8) ^ 128, scales, steps + 128, bits=8)


def _decode_packed(parts: Parts, shape: Shape) -> Weight:
    """Unsigned numbers in int32 [out, words], the lowest bits first; zeros are packed along the outputs."""
    rows, inputs = shape
    packed = parts["weight_packed"]
    stored_shape = parts["weight_shape"].flatten()[:3].tolist()
    if stored_shape != list(shape):
        raise ValueError(f"its weight_shape is {stored_shape}; {list(shape)} is needed")
    if len(packed) != rows:
        raise ValueError(f"its weight_packed has {len(packed)} rows; {rows} are needed")
    bits = packed_bits(packed.shape[1], inputs)
    values = unpack(packed, bits).flatten(1)[:, :inputs].contiguous()
    scales = _by_row(scales_of(parts, "weight_scale"), rows)
    if "weight_zero_point" in parts:
        require_shape(parts, "weight_zero_point", (-(-rows * bits // 32), scales.shape[1]))
        zeros = unpack(parts["weight_zero_point"], bits).transpose(1, 2).flatten(0, 1)[:rows]
    else:
        zeros = torch.full(scales.shape, 1 << (bits - 1))
    group_of = parts.get("weight_g_idx")
    if group_of is not None and bool((group_of == -1).any()):  # created, but never set
        group_of = None
    return grouped(values, scales, zeros, bits=bits, group_of=group_of)


def _by_row(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, groups] of numbers for the whole matrix, for its rows or for their groups."""
    table = numbers.reshape(-1, 1) if numbers.ndim < 2 else numbers
    if len(table) not in (1, rows):
        raise ValueError(f"it has scales or zeros for {len(table)} rows; 1 or {rows} are needed")
    return table.expand(rows, -1)


def compressed_formats(blocks: Sequence[Block | None]) -> tuple[MatrixFormat, MatrixFormat]:
    """Return the possible formats of a matrix: packed, or a number for each weight.

    Args:
        blocks: rows and inputs that share a scale in float8: at most one size, and None if there are matrices
            where a row or the matrix has one.
    """
    return (
        MatrixFormat(
            key="weight_packed",
            needed=("weight_packed", "weight_scale", "weight_shape"),
            optional=("weight_zero_point", "weight_g_idx"),
            ignored=_ACTIVATIONS,
            decode=_decode_packed,
        ),
        MatrixFormat(
            key="weight_scale",
            needed=("weight", "weight_scale"),
            optional=("weight_zero_point",),
            ignored=_ACTIVATIONS,
            decode=functools.partial(_decode_plain, blocks=blocks),
        ),
    )
