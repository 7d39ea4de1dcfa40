"""How keys and values become the numbers of a page, and numbers again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

_MOST_INT8, _MOST_INT4 = 127.0, 7.0
_INT4_ZERO = 8


@runtime_checkable
class PageQuantizer(Protocol):
    """Turns keys or values into what a page holds, and back; each vector by itself."""

    def quantize(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return states [..., head_dim] as numbers [..., n] and scales [...] or [..., k], or None."""

    def dequantize(self, numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return numbers and scales, of the shapes that `quantize` returns, as states [..., head_dim]."""


class Int8PageQuantizer:
    """int8 with a float32 scale for each token and head; the native kernels compute on it as it is."""

    def quantize(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states [..., head_dim] as int8 [..., head_dim] and scales [...]."""
        return quantize_heads(states)

    def dequantize(self, numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return int8 [..., head_dim] times scales [...] in float32."""
        assert scales is not None
        return numbers.float().mul_(scales.unsqueeze(-1))


class Int4PageQuantizer:
    """4 bits, two features in a byte, with a float32 scale for each token and head.

    Vectors are rotated first (see `rotated`), which spreads the outliers of keys over all features (QuaRot,
    Ashkboos et al. 2024). The native kernels compute on the rotated vectors: they rotate queries, and what
    they sum of values.
    """

    def quantize(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states [..., head_dim] as uint8 [..., head_dim / 2] and scales [...]; head_dim is even.

        A byte holds feature 2i in its low bits and 2i + 1 in its high ones, each -7 to 7 plus 8.
        """
        steps, scales = _steps_and_scales(rotated(states.float()), _MOST_INT4)
        numbers = steps.add_(_INT4_ZERO).to(torch.uint8)
        return numbers[..., 0::2] | numbers[..., 1::2] << 4, scales

    def dequantize(self, numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return uint8 [..., head_dim / 2] and scales [...] as float32 [..., head_dim]."""
        assert scales is not None
        wide = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2).float().sub_(_INT4_ZERO)
        return rotated(wide.mul_(scales.unsqueeze(-1)))


class ConvertingQuantizer:
    """Calls a function on keys and values; what it makes only has to be converted to floats to be read.

    Args:
        convert: returns states [..., head_dim] as numbers [..., head_dim].
    """

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._convert = convert

    def quantize(self, states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the function's result."""
        return self._convert(states), None

    def dequantize(self, numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return the numbers as float32."""
        assert scales is None
        return numbers.float()


class Float8PageQuantizer(ConvertingQuantizer):
    """float8_e4m3fn without scales: the nearest number of 4 significant bits, at most 448 in magnitude."""

    def __init__(self) -> None:
        super().__init__(_to_float8)


BUILT_IN_QUANTIZERS: dict[str, type[PageQuantizer]] = {
    "int8": Int8PageQuantizer,
    "int4": Int4PageQuantizer,
    "float8_e4m3fn": Float8PageQuantizer,
}
"""Quantizers of caches, by their type; caches of other types are floats as they are."""


def rotated(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., n] float32 times a rotation that is its own inverse.

    It is the fast Walsh-Hadamard transform, of as many adjacent features at a time as the largest power of
    two that divides n.
    """
    width = vectors.shape[-1] & -vectors.shape[-1]
    parts: torch.Tensor = vectors * width**-0.5
    half = 1
    while half < width:
        first, second = parts.reshape(-1, 2, half).unbind(1)
        parts = torch.stack((first + second, first - second), 1)
        half *= 2
    return parts.view(vectors.shape)


def _to_float8(states: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(torch.float8_e4m3fn).max
    return states.float().clamp(-most, most).to(torch.float8_e4m3fn)


def quantize_heads(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [..., head_dim] as int8 [..., head_dim] times scales [...] float32, ties to even."""
    steps, scales = _steps_and_scales(states.float(), _MOST_INT8)
    return steps.to(torch.int8), scales


def _steps_and_scales(wide: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors [..., n] as whole numbers, the largest magnitude being `most`, times scales [...]."""
    limit = wide.abs().amax(-1)
    inverse = torch.where(limit > 0.0, most / limit, 0.0)
    return (wide * inverse.unsqueeze(-1)).round_(), limit / most
