"""How keys and values become the numbers of a page, and numbers again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch


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
    "float8_e4m3fn": Float8PageQuantizer,
}
"""Quantizers of caches, by their type; caches of other types are floats as they are."""


def _to_float8(states: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(torch.float8_e4m3fn).max
    return states.float().clamp(-most, most).to(torch.float8_e4m3fn)


def quantize_heads(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [..., head_dim] as int8 [..., head_dim] times scales [...] float32, ties to even."""
    wide = states.float()
    limit = wide.abs().amax(-1)
    inverse = torch.where(limit > 0.0, 127.0 / limit, 0.0)
    return (wide * inverse.unsqueeze(-1)).round_().to(torch.int8), limit / 127.0
