"""The GGUF tensor types that Quire reads, and their conversion.

Layouts: https://github.com/ggml-org/ggml, ggml-common.h. All but the floating-point ones are rows of blocks,
each with its float16 scale d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.kernels.layers.weights import INT4_ZERO, INT6_ZERO, MAX_ZERO, GroupedWeight, Weight, dequantize
from quire.models.checkpoints.gguf.codebooks import codebook
from quire.models.checkpoints.gguf.file import BLOCKS, STORED_AS, type_name

_Decode = Callable[[torch.Tensor], Weight]
_HALF_EXPONENT = 0x7C00  # of float16; all ones: infinite or NaN
_INT8_ZERO = 128  # the step of unsigned bytes that stands for the 0 of signed ones
_Q5_ZERO = 16
_Q3_ZERO = 4
_MAX_MXFP4_SCALE = 252  # 12 times the next power of two is infinite
_MXFP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # halves of these: FP4
_IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(slots=True, frozen=True)
class Linear:
    """Numbers value * scale + least of their group, as blocks with minima have them."""

    values: torch.Tensor  # [rows, groups, group_size] uint8
    scales: torch.Tensor  # [rows, groups] float32
    least: torch.Tensor  # likewise
    bits: int


@dataclasses.dataclass(slots=True, frozen=True)
class Kind:
    """A kind of tensor: blocks of `block_size` numbers in `block_bytes` bytes.

    `unpack` makes of bytes [rows, blocks, block_bytes] the numbers [rows, blocks * block_size]. `steps`
    are the first and the end of its float16 numbers, each 2 bytes: d, and the unit of minima. `groups`: bits
    and group size of what `decode` returns; None: floating point.
    """

    name: str
    block_size: int
    block_bytes: int
    unpack: Callable[[torch.Tensor], Weight | Linear]
    steps: tuple[int, int] = (0, 0)
    groups: tuple[int, int] | None = None

    def _check(self, octets: torch.Tensor) -> None:
        if self.block_size == 1:
            return
        if self.name == "MXFP4":
            is_finite = octets[..., 0] <= _MAX_MXFP4_SCALE
        else:
            halves = octets.view(torch.int16)[..., slice(*self.steps)]
            is_finite = (halves & _HALF_EXPONENT) != _HALF_EXPONENT  # isfinite takes four times as long
        if not bool(is_finite.all()):
            raise ValueError(f"its blocks of {self.name} have invalid scales: infinite or NaN")

    def decode(self, octets: torch.Tensor) -> Weight:
        """Return the numbers [rows, blocks * block_size] in a form that kernels hold.

        Where 0 stands for the least number of a group, that is held as the place of zero, rounded.

        Args:
            octets: [rows, blocks, block_bytes].

        Raises:
            ValueError: a block's scale is infinite or NaN, or makes its numbers so.
        """
        self._check(octets)
        numbers = self.unpack(octets)
        return _with_least(numbers) if isinstance(numbers, Linear) else numbers

    def floats(self, octets: torch.Tensor) -> torch.Tensor:
        """Return the numbers as ggml's reference computes them, bit for bit."""
        numbers = self.unpack(octets)
        if not isinstance(numbers, Linear):
            return dequantize(numbers)
        return (numbers.values * numbers.scales[..., None] + numbers.least[..., None]).flatten(1)


def _as_type(dtype: torch.dtype) -> _Decode:
    return lambda octets: octets.flatten(1).view(dtype)


def _q4_0(octets: torch.Tensor) -> Weight:
    """d, then 16 bytes: the first half of the block in the low bits, the other in the high ones; 8 is 0."""
    scales = _first_half(octets)
    nibbles = octets[..., 2:]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=2).flatten(1)
    return GroupedWeight(values, scales, torch.full_like(scales, INT4_ZERO), bits=4)


def _q4_1(octets: torch.Tensor) -> Linear:
    """d and the block's minimum m, then as Q4_0; 0 is m."""
    numbers = octets[..., :4].contiguous().view(torch.float16).float()
    nibbles = octets[..., 4:]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=2)
    return Linear(values, numbers[..., 0], numbers[..., 1], bits=4)


def _q5_0(octets: torch.Tensor) -> Weight:
    """d, then `_with_fifth_bits`; 16 is 0."""
    scales = _first_half(octets)
    values = _with_fifth_bits(octets[..., 2:]).flatten(1) + int(INT6_ZERO - _Q5_ZERO)
    return GroupedWeight(values, scales, torch.full_like(scales, INT6_ZERO), bits=6)


def _q5_1(octets: torch.Tensor) -> Linear:
    """d and the block's minimum m, then `_with_fifth_bits`; 0 is m."""
    numbers = octets[..., :4].contiguous().view(torch.float16).float()
    return Linear(_with_fifth_bits(octets[..., 4:]), numbers[..., 0], numbers[..., 1], bits=8)


def _with_fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the numbers [rows, blocks, 32]: a bit of each in 4 bytes, lowest first, the rest as in Q4_0."""
    bits = (octets[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    nibbles = octets[..., 4:]
    return torch.cat((nibbles & 15, nibbles >> 4), dim=2) | bits.flatten(2) << 4


def _q8_0(octets: torch.Tensor) -> Weight:
    """d, then 32 signed bytes."""
    return _signed(octets[..., 2:], _first_half(octets))


def _q2_k(octets: torch.Tensor) -> Linear:
    """16 bytes of a scale and a minimum in 4 bits each, `_crumbs`, d, the unit of the minima."""
    steps = octets[..., 80:].contiguous().view(torch.float16).float()
    scales, least = steps[..., :1] * (octets[..., :16] & 15), -(steps[..., 1:] * (octets[..., :16] >> 4))
    values = _crumbs(octets[..., 16:80]).reshape(len(octets), -1, 16)
    return Linear(values, scales.flatten(1), least.flatten(1), bits=4)


def _q3_k(octets: torch.Tensor) -> Weight:
    """The high bits of 256 numbers as those of Q5_K, `_crumbs`, 12 bytes of scales, d; 4 is 0.

    The scales are 16 numbers of 6 bits, 32 is 0: the low 4 bits in 8 bytes, low nibbles first, the others
    in 4 bytes, two bits after two.
    """
    bits = (octets[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = _crumbs(octets[..., 32:96]) | bits << 2
    low, high = octets[..., 96:104], octets[..., 104:108]
    nibbles = torch.cat((low & 15, low >> 4), dim=2)
    pairs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    scales = _first_half(octets[..., 108:])[..., None] * ((nibbles | pairs << 4).float() - 32)
    wide = scales.flatten(1)
    return GroupedWeight(values.flatten(1), wide, torch.full_like(wide, _Q3_ZERO), bits=4)


def _crumbs(octets: torch.Tensor) -> torch.Tensor:
    """Return the numbers [rows, blocks, 8, 32] of two bits: 128 in 32 bytes, the lowest bits first."""
    runs = octets.reshape(*octets.shape[:2], 2, 1, 32)
    return torch.cat([(runs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(2, 3)


def _q4_k(octets: torch.Tensor) -> Linear:
    """`_scales_of_8`, then 4 bits of each number: 64 numbers in 32 bytes, low nibbles first."""
    scales, least = _scales_of_8(octets)
    values = _low_bits(octets[..., 16:]).flatten(1, 2)
    return Linear(values, scales.flatten(1), least.flatten(1), bits=4)


def _q5_k(octets: torch.Tensor) -> Linear:
    """As Q4_K, with a fifth bit: of the numbers of group g in bit g of 32 bytes, before the others."""
    scales, least = _scales_of_8(octets)
    bits = (octets[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = (_low_bits(octets[..., 48:]) | bits << 4).flatten(1, 2)
    return Linear(values, scales.flatten(1), least.flatten(1), bits=8)


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


def _with_least(numbers: Linear) -> GroupedWeight:
    scales, least = numbers.scales, numbers.least
    # In a flat group all numbers are the least one, or as good as: 0 less a zero of -1, times it.
    is_flat = scales.abs() * MAX_ZERO <= least.abs()
    zeros = torch.where(is_flat, -1.0, -least / torch.where(is_flat, 1.0, scales))
    values = numbers.values
    if bool(is_flat.any()):
        values = torch.where(is_flat[..., None], 0, values).to(torch.uint8)
    return GroupedWeight(values.flatten(1), torch.where(is_flat, least, scales), zeros, numbers.bits)


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
    return _signed(_by_table(octets[..., 2:], _IQ4_NUMBERS), _first_half(octets))


def _iq4_xs(octets: torch.Tensor) -> Weight:
    """d, the scales of 8 groups, and these as in IQ4_NL.

    The scales have 6 bits, 32 is 0: the high ones in 2 bytes, lowest first, then the low 4 in 4.
    """
    low, high = octets[..., 4:8, None], octets[..., 2:4, None]
    nibbles = torch.cat((low & 15, low >> 4), dim=3).flatten(2)
    pairs = ((high >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8)) & 3).flatten(2)
    scales = _first_half(octets)[..., None] * ((nibbles | pairs << 4).float() - 32)
    groups = octets[..., 8:].reshape(len(octets), -1, 16)
    return _signed(_by_table(groups, _IQ4_NUMBERS), scales.flatten(1))


def _mxfp4(octets: torch.Tensor) -> Weight:
    """A power of two, 2^127 less than that of its byte, then 16 bytes as in IQ4_NL."""
    exponents = octets[..., 0].int() - 128  # one less, for the table has doubles
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    held = _signed(_by_table(octets[..., 1:], _MXFP4_NUMBERS), scales)
    return dataclasses.replace(held, is_mxfp4=True)


def _by_table(nibbles: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers [rows, groups, 32] whose places are nibbles [rows, groups, 16], low ones first."""
    octets = bytearray(nibbles.contiguous().numpy())
    unsigned = [number & 255 for number in numbers]
    tables = bytes(unsigned * 16), bytes(number for number in unsigned for _ in range(16))
    # Ten times as fast as indexing a tensor by each number.
    halves = [torch.frombuffer(octets.translate(table), dtype=torch.uint8) for table in tables]
    return torch.cat([half.view(nibbles.shape) for half in halves], dim=2)


def _iq2_xxs(octets: torch.Tensor) -> Weight:
    """d, then for 8 groups of 32 numbers 4 places in the codebook, and `_signs_and_scale`."""
    groups = octets[..., 2:].reshape(len(octets), -1, 8)
    signs, scales = _signs_and_scale(groups[..., 4:])
    return _by_codebook("IQ2_XXS", groups[..., :4], signs, _finer(octets, scales) * 0.25)


def _iq2_xs(octets: torch.Tensor) -> Weight:
    """d, 32 words with a place of 9 bits and 7 `_signs`, 16 scales of 4 bits."""
    words = octets[..., 2:66].contiguous().view(torch.int16).int()
    scales = _nibbles(octets[..., 66:]).flatten(1)
    return _by_codebook("IQ2_XS", words & 511, _signs(words >> 9), _finer(octets, scales) * 0.25)


def _iq2_s(octets: torch.Tensor) -> Weight:
    """d, 32 low bytes of places, 32 bytes of signs, two high bits of each place, 16 scales of 4 bits."""
    high = (octets[..., 66:74, None] >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8)) & 3
    places = octets[..., 2:34].int() | high.flatten(2).int() << 8
    scales = _nibbles(octets[..., 74:]).flatten(1)
    return _by_codebook("IQ2_S", places, octets[..., 34:66], _finer(octets, scales) * 0.25)


def _iq3_xxs(octets: torch.Tensor) -> Weight:
    """d, 64 places in the codebook, and `_signs_and_scale` of each of 8 groups."""
    signs, scales = _signs_and_scale(octets[..., 66:].reshape(len(octets), -1, 4))
    return _by_codebook("IQ3_XXS", octets[..., 2:66], signs, _finer(octets, scales) * 0.5)


def _iq3_s(octets: torch.Tensor) -> Weight:
    """d, 64 low bytes of places, a high bit of each, 32 bytes of signs, 8 scales of 4 bits."""
    high = (octets[..., 66:74, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    places = octets[..., 2:66].int() | high.flatten(2).int() << 8
    odd = 1 + 2 * _nibbles(octets[..., 106:])
    return _by_codebook("IQ3_S", places, octets[..., 74:106], _first_half(octets)[..., None] * odd)


def _by_codebook(name: str, places: torch.Tensor, signs: torch.Tensor, scales: torch.Tensor) -> Weight:
    """Return the codebook's points at `places`, negative where a bit of `signs` is set, times scales."""
    magnitudes = codebook(name)[places.int().flatten(1)].flatten(1)
    bits = (signs.flatten(1)[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    values = torch.where(bits.flatten(1) > 0, -magnitudes, magnitudes)
    return _signed(values.view(torch.uint8).reshape(*scales.flatten(1).shape, -1), scales.flatten(1))


def _signs_and_scale(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a group's bytes of signs [rows, groups, 4] and number of 4 bits, which are 4 bytes."""
    numbers = words.contiguous().view(torch.int32)
    return _signs(numbers >> torch.tensor((0, 7, 14, 21))), numbers.squeeze(2) >> 28 & 15


def _signs(sevens: torch.Tensor) -> torch.Tensor:
    """Return bytes of signs: the low 7 bits of integers, and an eighth that makes their number even."""
    bits = sevens & 127
    folded = bits ^ bits >> 4
    folded = folded ^ folded >> 2
    return (bits | ((folded ^ folded >> 1) & 1) << 7).to(torch.uint8)


def _finer(octets: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return d times (half more than scales [rows, groups])."""
    return (_first_half(octets)[..., None] * (0.5 + scales.view(*octets.shape[:2], -1))).flatten(1)


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Return the numbers of 4 bits in bytes, the low one of each first."""
    return torch.stack((octets & 15, octets >> 4), dim=3).flatten(2)


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
    return GroupedWeight(values, wide, torch.full_like(wide, INT6_ZERO), bits=6)


_BITS = {"int4": 4, "int6": 6, "grouped_int8": 8, "mxfp4": 8}
_D = (0, 1)
_D_AND_MIN = (0, 2)
_UNPACK: dict[int, tuple[Callable[[torch.Tensor], Weight | Linear], tuple[int, int]]] = {
    0: (_as_type(torch.float32), (0, 0)),
    1: (_as_type(torch.float16), (0, 0)),
    2: (_q4_0, _D),
    3: (_q4_1, _D_AND_MIN),
    6: (_q5_0, _D),
    7: (_q5_1, _D_AND_MIN),
    8: (_q8_0, _D),
    10: (_q2_k, (40, 42)),
    11: (_q3_k, (54, 55)),
    12: (_q4_k, _D_AND_MIN),
    13: (_q5_k, _D_AND_MIN),
    14: (_q6_k, (104, 105)),
    16: (_iq2_xxs, _D),
    17: (_iq2_xs, _D),
    18: (_iq3_xxs, _D),
    20: (_iq4_nl, _D),
    21: (_iq3_s, _D),
    22: (_iq2_s, _D),
    23: (_iq4_xs, _D),
    30: (_as_type(torch.bfloat16), (0, 0)),
    39: (_mxfp4, (0, 0)),
}


def _groups(name: str) -> tuple[int, int] | None:
    stored = STORED_AS.get(name)
    return None if stored is None else (_BITS[stored.kind], stored.group_size)


KINDS = {
    number: Kind(type_name(number), *BLOCKS[number], unpack, steps, _groups(type_name(number)))
    for number, (unpack, steps) in _UNPACK.items()
}
"""By ggml's number."""
