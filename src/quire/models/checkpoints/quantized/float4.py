"""Matrices of 4-bit floats (E2M1) in groups: MXFP4 with scales that are powers of two, NVFP4 with others.

Formats: OCP Microscaling Formats (MX) v1.0, as gpt-oss stores its experts ("mxfp4": `blocks`, `scales`), and
mxfp4-pack-quantized and nvfp4-pack-quantized of compressed-tensors.
"""

from __future__ import annotations

import dataclasses

import torch

from quire.kernels.bounds import MXFP4_GROUP
from quire.kernels.layers.weights import GroupedWeight, Weight
from quire.models.checkpoints.quantized.matrices import (
    INT8_ZERO,
    MatrixFormat,
    Parts,
    Shape,
    grouped,
    require_shape,
    scales_of,
)

NVFP4_GROUP = 16  # inputs that share a scale
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # what codes stand for, in halves; then the same below zero
_BIAS, _NAN = 127, 255  # of scales that are exponents


def _from_codes(octets: torch.Tensor, scales: torch.Tensor, *, is_mx: bool) -> Weight:
    """Return a matrix of codes [rows, inputs / 2], the lower four bits first, with float32 scales.

    Twice a code's number is an integer, so that 8 bits hold it exactly.
    """
    numbers = torch.tensor([*_HALVES, *(-half for half in _HALVES)]) + INT8_ZERO
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=-1).to(torch.uint8)
    words = pairs.view(torch.int16).flatten()  # a look-up copies two numbers at once
    values = words.index_select(0, octets.flatten().int()).view(torch.uint8).view(len(octets), -1)
    held = grouped(values, scales / 2, torch.full_like(scales, INT8_ZERO), bits=8)
    return dataclasses.replace(held, is_mxfp4=is_mx) if isinstance(held, GroupedWeight) else held


def _powers_of_two(exponents: torch.Tensor, name: str) -> torch.Tensor:
    if exponents.dtype != torch.uint8:
        raise ValueError(f"its {name} is stored as {exponents.dtype}; uint8 is needed")
    if bool((exponents == _NAN).any()):
        raise ValueError(f"its {name} has invalid scales: NaN")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - _BIAS)


def _require_octets(octets: torch.Tensor, name: str) -> None:
    if octets.dtype != torch.uint8:
        raise ValueError(f"its {name} is stored as {octets.dtype}; uint8 is needed")


def _decode_mxfp4(parts: Parts, shape: Shape) -> Weight:
    """blocks [out, in / 32, 16], scales [out, in / 32]."""
    rows, inputs = shape
    groups = inputs // MXFP4_GROUP
    require_shape(parts, "blocks", (rows, groups, MXFP4_GROUP // 2))
    require_shape(parts, "scales", (rows, groups))
    _require_octets(parts["blocks"], "blocks")
    return _from_codes(parts["blocks"].flatten(1), _powers_of_two(parts["scales"], "scales"), is_mx=True)


def _decode_compressed(parts: Parts, shape: Shape) -> Weight:
    """weight_packed [out, in / 2], weight_scale [out, groups], in NVFP4 divided by weight_global_scale."""
    rows, inputs = shape
    octets, scales = parts["weight_packed"], parts["weight_scale"]
    is_mx = scales.dtype == torch.uint8
    require_shape(parts, "weight_packed", (rows, inputs // 2))
    require_shape(parts, "weight_scale", (rows, inputs // (MXFP4_GROUP if is_mx else NVFP4_GROUP)))
    _require_octets(octets, "weight_packed")
    if is_mx:
        return _from_codes(octets, _powers_of_two(scales, "weight_scale"), is_mx=True)
    if scales.dtype != torch.float8_e4m3fn or "weight_global_scale" not in parts:
        raise ValueError(
            f"its weight_scale is stored as {scales.dtype}; needed are exponents in uint8 (MXFP4), or "
            "float8_e4m3fn and a weight_global_scale (NVFP4)"
        )
    whole = scales_of(parts, "weight_global_scale")
    if whole.numel() != 1 or float(whole) <= 0:
        raise ValueError("its weight_global_scale must be one positive number")
    return _from_codes(octets, scales_of(parts, "weight_scale") / whole.reshape(1, 1), is_mx=False)


MXFP4_FORMAT = MatrixFormat(
    key="blocks", needed=("blocks", "scales"), optional=(), ignored=(), decode=_decode_mxfp4
)
COMPRESSED_FORMAT = MatrixFormat(
    key="weight_packed",
    needed=("weight_packed", "weight_scale"),
    optional=("weight_global_scale",),
    ignored=("input_global_scale", "input_scale"),
    decode=_decode_compressed,
)
