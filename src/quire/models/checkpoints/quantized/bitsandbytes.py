"""Matrices as bitsandbytes stores them: NF4 and FP4 become floats, LLM.int8 stays.

Layout: https://github.com/bitsandbytes-foundation/bitsandbytes, `QuantState.as_dict`, `Linear8bitLt`. Names
such as `weight.absmax` are read as `weight_absmax` (`quire.models.checkpoints.names`), so that the parts of a
matrix differ in the last component only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from quire.kernels.layers.weights import Int8Weight, Weight
from quire.models.checkpoints.quantized.matrices import (
    MatrixFormat,
    Parts,
    Shape,
    require_shape,
    scales_of,
)

_STATE = "weight_quant_state_bitsandbytes__{}"
_MAX_STATE = 1 << 14  # bytes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STEPS = 127  # of int8, to the largest magnitude of a row


def _decode_4_bits(parts: Parts, shape: Shape, state: Mapping[str, Any]) -> torch.Tensor:
    """Codes of a row-major matrix, the upper four bits first; each block of them has a largest magnitude."""
    rows, inputs = shape
    dtype = _DTYPES.get(str(state.get("dtype")).removeprefix("torch."))
    if state.get("shape") != list(shape) or dtype is None:
        raise ValueError(
            f"its quant_state has shape {state.get('shape')!r:.100} and dtype {state.get('dtype')!r:.100}; "
            f"{list(shape)} and {', '.join(_DTYPES)} are supported"
        )
    octets = parts["weight"].contiguous().view(torch.uint8).flatten()
    if len(octets) != -(-rows * inputs // 2):
        raise ValueError(f"its weight has {len(octets)} bytes; {-(-rows * inputs // 2)} are needed")
    numbers = _map_of(parts, "weight_quant_map", 16)
    pairs = torch.stack((numbers.repeat_interleave(16), numbers.repeat(16)), dim=-1)
    words = pairs.view(torch.float64).flatten()  # a look-up copies two numbers at once
    values = words.index_select(0, octets.int()).view(torch.float32)[: rows * inputs]
    return _times_blocks(values, _largest(parts, state), _size(state, "blocksize")).view(shape).to(dtype)


def _largest(parts: Parts, state: Mapping[str, Any]) -> torch.Tensor:
    """Return the largest magnitude of each block, which may be quantized in blocks itself."""
    absmax = parts["weight_absmax"].flatten()
    if "weight_nested_absmax" not in parts:
        return scales_of(parts, "weight_absmax").flatten()
    if absmax.dtype != torch.uint8 or not isinstance(state.get("nested_offset"), int | float):
        raise ValueError("its weight_absmax is nested, and not in uint8, or quant_state has no nested_offset")
    values = _map_of(parts, "weight_nested_quant_map", 256)[absmax.int()]
    of_blocks = scales_of(parts, "weight_nested_absmax").flatten()
    return _times_blocks(values, of_blocks, _size(state, "nested_blocksize")).add_(state["nested_offset"])


def _times_blocks(values: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply runs of `size` values by a scale each; the last one may be shorter."""
    if len(scales) != -(-len(values) // size):
        raise ValueError(f"it has {len(scales)} scales for {len(values)} numbers in blocks of {size}")
    whole = len(values) // size * size
    values[:whole].view(-1, size).mul_(scales[: whole // size, None])
    values[whole:].mul_(scales[whole // size :].sum())
    return values


def _map_of(parts: Parts, name: str, size: int) -> torch.Tensor:
    if name not in parts:
        raise ValueError(f"it has no {name}")
    require_shape(parts, name, (size,))
    return scales_of(parts, name)


def _size(state: Mapping[str, Any], name: str) -> int:
    size = state.get(name)
    if type(size) is not int or not 1 <= size <= 1 << 16:
        raise ValueError(f"its quant_state has {name} {size!r:.100}; it must be an integer from 1 to 65536")
    return size


def _format_of_4_bits(kind: str) -> MatrixFormat:
    key = _STATE.format(kind)

    def decode(parts: Parts, shape: Shape) -> Weight:
        octets = parts[key]
        if octets.dtype != torch.uint8 or octets.numel() > _MAX_STATE:
            raise ValueError(f"its quant_state is no text of at most {_MAX_STATE} bytes")
        state = json.loads(bytes(octets.tolist()))
        if not isinstance(state, dict):
            raise ValueError("its quant_state is no object")
        return _decode_4_bits(parts, shape, state)

    return MatrixFormat(
        key=key,
        needed=("weight", "weight_absmax", "weight_quant_map", key),
        optional=("weight_nested_absmax", "weight_nested_quant_map"),
        ignored=(),
        decode=decode,
    )


def _decode_int8(parts: Parts, shape: Shape) -> Weight:
    """int8 [out, in], SCB [out]: the largest magnitude of each row."""
    require_shape(parts, "weight", shape)
    require_shape(parts, "SCB", shape[:1])
    if parts["weight"].dtype != torch.int8:
        raise ValueError(f"its weight is stored as {parts['weight'].dtype}; int8 is needed")
    if "weight_format" in parts and bool(parts["weight_format"].any()):
        raise ValueError("its weight_format is not 0, rows one after the other")
    return Int8Weight(parts["weight"], scales_of(parts, "SCB") / _STEPS)


FORMATS = (
    _format_of_4_bits("nf4"),
    _format_of_4_bits("fp4"),
    MatrixFormat(
        key="SCB", needed=("weight", "SCB"), optional=("weight_format",), ignored=(), decode=_decode_int8
    ),
)
