"""The GGUF tensor types that Quire reads, and their conversion.

Layouts: https://github.com/ggml-org/ggml, ggml-common.h. All but the floating-point ones are rows of blocks,
each with its float16 scale d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.kernels.layers.weights import INT4_ZERO, MAX_ZERO, GroupedWeight, Weight
from quire.models.checkpoints.gguf.file import BLOCKS

_Decode = Callable[[torch.Tensor], Weight]
_HALF_EXPONENT = 0x7C00  # of float16; all ones: infinite or NaN
_INT8_ZERO = 128  # the step of unsigned bytes that stands for the 0 of signed ones
_Q5_ZERO = 16
_Q6_ZERO = 32
_IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(slots=True, frozen=True)
class Kind:
    """A kind of tensor: blocks of `block_size` numbers in `block_bytes` bytes.

    `decode` makes of bytes [rows, blocks, block_bytes] the numbers [rows, blocks * block_size]. `steps`
    are the first and the end of its float16 numbers, each 2 bytes: d, and the unit of minima.
    """

    name: str
    block_size: int
    block_bytes: int
    decode: _Decode
    steps: tuple[int, int] = (0, 0)

    def check(self, octets: torch.Tensor) -> None:
        """Raise ValueError if a block's scale is infinite or NaN, which all of its numbers would be, too.

        Args:
            octets: [rows, blocks, block_bytes].
        """
        halves = octets.view(torch.int16)[..., slice(*self.steps)]
        if not bool(((halves & _HALF_EXPONENT) != _HALF_EXPONENT).all()):  # isfinite takes four times as long
            raise ValueError(f"its blocks of {self.name} have invalid scales: infinite or NaN")


def _as_type(dtype: torch.dtype) -> _Decode:
    return lambda octets: octets.flatten(1).view(dtype)


def _q4_0(octets: torch.Tensor) -> Weight:
    """d, then 16 bytes: the first half of the block in the low bits, the other in the high ones; 8 is 0."""
    scales = _first_half(octets)
    nibbles = octets[..., 2:]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=2).flatten(1)
    return GroupedWeight(values, scales, torch.full_like(scales, INT4_ZERO), bits=4)


def _q4_1(octets: torch.Tensor) -> Weight:
    """d and the block's minimum m, then as Q4_0; 0 is m."""
    numbers = octets[..., :4].contiguous().view(torch.float16).float()
    nibbles = octets[..., 4:]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=2)
    return _with_least(values, numbers[..., 0], numbers[..., 1], bits=4)


def _q5_0(octets: torch.Tensor) -> Weight:
    """d, then `_with_fifth_bits`; 16 is 0."""
    scales = _first_half(octets)
    values = _with_fifth_bits(octets[..., 2:])
    return GroupedWeight(values.flatten(1), scales, torch.full_like(scales, _Q5_ZERO), bits=8)


def _q5_1(octets: torch.Tensor) -> Weight:
    """d and the block's minimum m, then `_with_fifth_bits`; 0 is m."""
    numbers = octets[..., :4].contiguous().view(torch.float16).float()
    return _with_least(_with_fifth_bits(octets[..., 4:]), numbers[..., 0], numbers[..., 1], bits=8)


def _with_fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the numbers [rows, blocks, 32]: a bit of each in 4 bytes, lowest first, the rest as in Q4_0."""
    bits = (octets[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    nibbles = octets[..., 4:]
    return torch.cat((nibbles & 15, nibbles >> 4), dim=2) | bits.flatten(2) << 4


def _q8_0(octets: torch.Tensor) -> Weight:
    """d, then 32 signed bytes."""
    return _signed(octets[..., 2:], _first_half(octets))


def _q4_k(octets: torch.Tensor) -> Weight:
    """`_scales_of_8`, then 4 bits of each number: 64 numbers in 32 bytes, low nibbles first."""
    scales, least = _scales_of_8(octets)
    return _with_least(_low_bits(octets[..., 16:]), scales.flatten(1), least.flatten(1), bits=4)


def _q5_k(octets: torch.Tensor) -> Weight:
    """As Q4_K, with a fifth bit: of the numbers of group g in bit g of 32 bytes, before the others."""
    scales, least = _scales_of_8(octets)
    bits = (octets[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = _low_bits(octets[..., 48:]) | bits << 4
    return _with_least(values, scales.flatten(1), least.flatten(1), bits=8)


def _low_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the nibbles [rows, blocks, 8, 32] of bytes [rows, blocks, 128]."""
    runs = octets.reshape(*octets.shape[:2], 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=3).flatten(2, 3)


def _scales_of_8(octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima [rows, blocks, 8] of a block's groups of 32 numbers.

    A block has d, the unit of the minima, and 12 bytes: the low 6 bits of 8 bytes are the first four scales
        and the first four minima; the other 4 have the low 4 bits of the others, whose high 2 bits are in the
        8.
    """
    steps = octets[..., :4].contiguous().view(torch.float16).float()
    first, second, low = octets[..., 4:8], octets[..., 8:12], octets[..., 12:16]
    scales = torch.cat((first & 63, (low & 15) | (first >> 6) << 4), dim=2)
    least = torch.cat((second & 63, (low >> 4) | (second >> 6) << 4), dim=2)
    return steps[..., :1] * scales, -(steps[..., 1:] * least)


def _with_least(
    values: torch.Tensor, scales: torch.Tensor, least: torch.Tensor, *, bits: int
) -> GroupedWeight:
    """Return weights of value * scale + least: [rows, any, group_size] and two times [rows, groups]."""
    # In a flat group all numbers are the least one, or as good as: 0 less a zero of -1, times it.
    is_flat = scales.abs() * MAX_ZERO <= least.abs()
    zeros = torch.where(is_flat, -1.0, -least / torch.where(is_flat, 1.0, scales))
    values = torch.where(is_flat[..., None], 0, values.reshape(*scales.shape, -1)).to(torch.uint8)
    return GroupedWeight(values.flatten(1), torch.where(is_flat, least, scales), zeros, bits)


def _signed(values: torch.Tensor, scales: torch.Tensor) -> GroupedWeight:
    """Return weights of value * scale: bytes of int8 [rows, groups, group_size] and [rows, groups]."""
    return GroupedWeight(
        (values ^ _INT8_ZERO).flatten(1), scales, torch.full_like(scales, _INT8_ZERO), bits=8
    )


def _first_half(octets: torch.Tensor) -> torch.Tensor:
    """Return the float16 number [rows, blocks] that blocks begin with."""
    return octets[..., :2].contiguous().view(torch.float16).squeeze(2).float()


def _iq4_nl(octets: torch.Tensor) -> Weight:
    """d, then 16 bytes as in Q4_0, whose nibbles are places in a table."""
    nibbles = octets[..., 2:]
    places = torch.cat((nibbles & 15, nibbles >> 4), dim=2).int()
    numbers = torch.tensor(_IQ4_NUMBERS, dtype=torch.int8)[places]
    return _signed(numbers.view(torch.uint8), _first_half(octets))


def _q6_k(octets: torch.Tensor) -> Weight:
    """The low 4 bits of 256 numbers, their high 2 bits, 16 signed scales of 16 numbers each, d; 32 is zero.

    The bits of each half of the block lie in runs: of 64 bytes, all low nibbles and then all high ones; of 32
    bytes, two bits after two.
    """
    blocks = octets.shape[:2]
    low, high = octets[..., :128].reshape(*blocks, 2, 1, 64), octets[..., 128:192].reshape(*blocks, 2, 1, 32)
    scales, step = octets[..., 192:208], octets[..., 208:]
    nibbles = torch.cat((low & 15, low >> 4), dim=3).flatten(3)
    pairs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(3)
    values = nibbles.flatten(1) | (pairs.flatten(1) << 4)
    wide = (_first_half(step)[..., None] * scales.contiguous().view(torch.int8)).flatten(1)
    return GroupedWeight(values, wide, torch.full_like(wide, _Q6_ZERO), bits=8)


_D = (0, 1)
_D_AND_MIN = (0, 2)
KINDS: dict[int, Kind] = {  # by ggml's number
    0: Kind("F32", *BLOCKS[0], _as_type(torch.float32)),
    1: Kind("F16", *BLOCKS[1], _as_type(torch.float16)),
    2: Kind("Q4_0", *BLOCKS[2], _q4_0, _D),
    3: Kind("Q4_1", *BLOCKS[3], _q4_1, _D_AND_MIN),
    6: Kind("Q5_0", *BLOCKS[6], _q5_0, _D),
    7: Kind("Q5_1", *BLOCKS[7], _q5_1, _D_AND_MIN),
    8: Kind("Q8_0", *BLOCKS[8], _q8_0, _D),
    12: Kind("Q4_K", *BLOCKS[12], _q4_k, _D_AND_MIN),
    13: Kind("Q5_K", *BLOCKS[13], _q5_k, _D_AND_MIN),
    14: Kind("Q6_K", *BLOCKS[14], _q6_k, (104, 105)),
    20: Kind("IQ4_NL", *BLOCKS[20], _iq4_nl, _D),
    30: Kind("BF16", *BLOCKS[30], _as_type(torch.bfloat16)),
}
