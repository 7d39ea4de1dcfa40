"""The formats that a checkpoint stores its matrices in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.checkpoints.quantized.compressed_tensors import compressed_formats
from quire.models.checkpoints.quantized.description import (
    describe_quantization,
    float8_blocks,
    promised_parts,
)
from quire.models.checkpoints.quantized.float8 import float8_formats
from quire.models.checkpoints.quantized.gptq import AWQ_FORMAT, gptq_format
from quire.models.checkpoints.quantized.matrices import MatrixFormat


def formats_of(quantization_config: Mapping[str, Any]) -> tuple[MatrixFormat, ...]:
    """Return the quantized formats that a checkpoint with this `quantization_config` may contain.

    Raises:
        ModelError: see `describe_quantization`.
    """
    describe_quantization(quantization_config)
    if not quantization_config:
        return ()
    method = quantization_config["quant_method"]
    if method == "compressed-tensors":
        packed, plain = compressed_formats(float8_blocks(quantization_config))
        return (
            packed.requiring(promised_parts(quantization_config)),
            plain.requiring(promised_parts(quantization_config, is_packed=False)),
        )
    if method == "fp8":
        (block,) = float8_blocks(quantization_config)
        return float8_formats(block)
    if method == "awq":
        return (AWQ_FORMAT,)
    form = gptq_format(quantization_config.get("checkpoint_format") or "gptq")
    return (form.requiring(promised_parts(quantization_config)),)
