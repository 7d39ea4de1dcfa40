"""Matrices in float8_e4m3fn with a scale per matrix, row or block.

As `transformers` stores them ("fp8", the layout of DeepSeek-V3: `weight_scale_inv`, which weights are
multiplied with in spite of its name), and AutoFP8 (`weight_scale`). Scales of activations that were fixed in
advance are not used: Quire's are those of each token.
"""

from __future__ import annotations

import functools

import torch

from quire.kernels.layers.weights import Float8Weight, Weight
from quire.models.checkpoints.quantized.description import Block
from quire.models.checkpoints.quantized.matrices import MatrixFormat, Parts, Shape, require_shape, scales_of

_ACTIVATIONS = ("activation_scale", "input_scale", "output_scale")


def decode_float8(parts: Parts, shape: Shape, *, scale: str, block: Block | None) -> Weight:
    """Return float8 weights [out, in].

    Args:
        parts: the tensors `weight` and `scale`.
        shape: shape of the matrix.
        scale: last component of the scales' name. Without blocks they are [] or [1] for the matrix, or [out]
            or [out, 1] for its rows.
        block: rows and inputs that share a scale; None: there are no blocks.
    """
    require_shape(parts, "weight", shape)
    rows, inputs = shape
    values, scales = parts["weight"], scales_of(parts, scale)
    if values.dtype != torch.float8_e4m3fn:
        raise ValueError(f"its weight is stored as {values.dtype}; only float8_e4m3fn is supported")
    if bool((scales < 0).any()):
        raise ValueError(f"its {scale} has invalid scales: negative")
    if block is None:
        block = (rows, inputs) if scales.numel() == 1 else (1, inputs)
        if scales.ndim < 2:
            scales = scales.reshape(-1, 1)
    blocks = tuple(-(-size // of_one) for size, of_one in zip(shape, block, strict=True))
    if tuple(scales.shape) != blocks:
        raise ValueError(f"its {scale} has shape {list(parts[scale].shape)}; {list(blocks)} is needed")
    return Float8Weight(values, scales, block)


def float8_formats(block: Block | None) -> tuple[MatrixFormat, ...]:
    """Return the matrix formats of the method "fp8"."""
    return tuple(
        MatrixFormat(
            key=scale,
            needed=("weight", scale),
            optional=(),
            ignored=_ACTIVATIONS,
            decode=functools.partial(decode_float8, scale=scale, block=block),
        )
        for scale in ("weight_scale_inv", "weight_scale")
    )
