"""The matrix formats of checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from quire.kernels.layers.weights import Weight
from quire.models.checkpoints.quantized import bitsandbytes, float4
from quire.models.checkpoints.quantized.compressed_tensors import compressed_formats
from quire.models.checkpoints.quantized.description import (
    describe_quantization,
    float8_blocks,
    has_float4,
    promised_parts,
)
from quire.models.checkpoints.quantized.float8 import float8_formats
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

_ONES = {4: 0x11111111, 8: 0x01010101}  # a word of numbers of this many bits, all 1


def _decode_gptq(parts: Parts, shape: Shape, *, zero_offset: int) -> Weight:
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32]; g_idx [in]: the inputs' groups."""
    rows, inputs = shape
    qweight = parts["qweight"]
    bits = packed_bits(len(qweight), inputs)
    groups = len(parts["scales"])
    require_shape(parts, "qweight", (inputs * bits // 32, rows))
    require_shape(parts, "scales", (groups, rows))
    require_shape(parts, "qzeros", (groups, -(-rows * bits // 32)))
    values = unpack(qweight, bits).transpose(0, 1).flatten(1)
    # Added to words, not to numbers: a stored zero of 0 - 1 has borrowed from the next number.
    qzeros = parts["qzeros"] + zero_offset * _ONES[bits]
    zeros = unpack(qzeros, bits).flatten(1)[:, :rows]
    return grouped(values, scales_of(parts, "scales").t(), zeros.t(), bits=bits, group_of=parts.get("g_idx"))


def _decode_awq(parts: Parts, shape: Shape) -> Weight:
    """qweight [in, out / 8], qzeros [groups, out / 8]."""
    rows, inputs = shape
    groups = len(parts["scales"])
    if rows % 8:
        raise ValueError(f"it has {rows} output features, not a multiple of the 8 that AWQ packs together")
    require_shape(parts, "qweight", (inputs, rows // 8))
    require_shape(parts, "scales", (groups, rows))
    require_shape(parts, "qzeros", (groups, rows // 8))
    values, zeros = (_unpack_awq(parts[name]) for name in ("qweight", "qzeros"))
    return grouped(values, scales_of(parts, "scales").t(), zeros, bits=4)


def _unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """Return [out, n] from [n, out / 8]: words hold the even ones of eight neighbours first."""
    halves = unpack(packed, 4).view(*packed.shape, 2, 4)
    return halves.permute(1, 3, 2, 0).reshape(-1, len(packed))


_TENSORS = ("qweight", "qzeros", "scales")


def gptq_format(checkpoint_format: str) -> MatrixFormat:
    """Return the matrix format of "gptq" or "gptq_v2" checkpoints; the former store zeros - 1."""
    decode = functools.partial(_decode_gptq, zero_offset=0 if checkpoint_format == "gptq_v2" else 1)
    return MatrixFormat(key="qweight", needed=_TENSORS, optional=("g_idx",), ignored=(), decode=decode)


AWQ_FORMAT = MatrixFormat(key="qweight", needed=_TENSORS, optional=(), ignored=(), decode=_decode_awq)


_OF_METHODS: dict[str, tuple[MatrixFormat, ...]] = {
    "awq": (AWQ_FORMAT,),
    "mxfp4": (float4.MXFP4_FORMAT,),
    "bitsandbytes": bitsandbytes.FORMATS,
}


def formats_of(quantization_config: Mapping[str, Any]) -> tuple[MatrixFormat, ...]:
    """Return the quantized formats that a checkpoint with this `quantization_config` may contain.

    Raises:
        ModelError: see `describe_quantization`.
    """
    describe_quantization(quantization_config)
    if not quantization_config:
        return ()
    method = quantization_config["quant_method"]
    if method in _OF_METHODS:
        return _OF_METHODS[method]
    if method == "compressed-tensors":
        return _compressed(quantization_config)
    if method == "fp8":
        (block,) = float8_blocks(quantization_config)
        return float8_formats(block)
    form = gptq_format(quantization_config.get("checkpoint_format") or "gptq")
    return (form.requiring(promised_parts(quantization_config)),)


def _compressed(values: Mapping[str, Any]) -> tuple[MatrixFormat, ...]:
    packed, plain = compressed_formats(float8_blocks(values))
    packed = packed.requiring(promised_parts(values))
    plain = plain.requiring(promised_parts(values, is_packed=False))
    if not has_float4(values):
        return packed, plain
    # Packed integers have a tensor that packed floats do not have.
    return dataclasses.replace(packed, key="weight_shape"), float4.COMPRESSED_FORMAT, plain
