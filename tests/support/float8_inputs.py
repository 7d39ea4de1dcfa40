"""Weights in float8, made in torch."""

from __future__ import annotations

import torch

from quire.kernels.layers.weights import Float8Weight


def quantize_float8(weight: torch.Tensor) -> Float8Weight:
    """Return `weight` [rows, in] in float8: the largest magnitude of a row becomes 448."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / 448).clamp(min=2.0**-120)
    values = (wide * (1.0 / scales)).clamp(-448, 448)  # beyond, torch may make NaN
    return Float8Weight(values.to(torch.float8_e4m3fn), scales, (1, weight.shape[1]))


def random_blocks(rows: int, inputs: int, block: tuple[int, int], *, seed: int = 0) -> Float8Weight:
    """Return weights of about 1 with scales of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, inputs, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.randn(-(-rows // block[0]), -(-inputs // block[1]), generator=generator).exp()
    return Float8Weight(values, scales, block)
