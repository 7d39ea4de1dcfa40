"""The kinds of GGUF tensors that Quire reads, and what it makes of each.

Layouts: https://github.com/ggml-org/ggml, ggml-common.h. All but the floating-point ones are rows of blocks,
each with its float16 scale d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.kernels.weights import INT4_ZERO, Int4Weight, Weight
from quire.models.checkpoints.gguf.file import BLOCKS

_Decode = Callable[[torch.Tensor], Weight]


@dataclasses.dataclass(slots=True, frozen=True)
class Kind:
    """A kind of tensor: blocks of `block_size` numbers in `block_bytes` bytes.

    `decode` makes of bytes [rows, blocks, block_bytes] the numbers [rows, blocks * block_size].
    """

    name: str
    block_size: int
    block_bytes: int
    decode: _Decode


def _as_type(dtype: torch.dtype) -> _Decode:
    return lambda octets: octets.flatten(1).view(dtype)


def _q4_0(octets: torch.Tensor) -> Weight:
    """d, then 16 bytes: the first half of the block in the low bits, the other in the high ones; 8 is 0."""
    scales = octets[..., :2].contiguous().view(torch.float16).squeeze(2).float()
    nibbles = octets[..., 2:]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=2).flatten(1)
    return Int4Weight(values, scales, torch.full_like(scales, INT4_ZERO))


def _q4_1(octets: torch.Tensor) -> Weight:
    """d and the block's least number m, then as Q4_0; 0 stands for m."""
    numbers = octets[..., :4].contiguous().view(torch.float16).float()
    scales, least = numbers[..., :1], numbers[..., 1:]
    nibbles = octets[..., 4:]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=2)
    return (values * scales + least).flatten(1)


def _q8_0(octets: torch.Tensor) -> Weight:
    """d, then 32 signed bytes."""
    scales = octets[..., :2].contiguous().view(torch.float16).float()
    return (octets[..., 2:].view(torch.int8) * scales).flatten(1)


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
    values = (nibbles.flatten(2) | (pairs.flatten(2) << 4)).to(torch.int8) - 32
    wide = step.contiguous().view(torch.float16).float() * scales.contiguous().view(torch.int8)
    return (values.view(*blocks, 16, 16) * wide.unsqueeze(3)).flatten(1)


KINDS: dict[int, Kind] = {  # by ggml's number
    0: Kind("F32", *BLOCKS[0], _as_type(torch.float32)),
    1: Kind("F16", *BLOCKS[1], _as_type(torch.float16)),
    2: Kind("Q4_0", *BLOCKS[2], _q4_0),
    3: Kind("Q4_1", *BLOCKS[3], _q4_1),
    8: Kind("Q8_0", *BLOCKS[8], _q8_0),
    14: Kind("Q6_K", *BLOCKS[14], _q6_k),
    30: Kind("BF16", *BLOCKS[30], _as_type(torch.bfloat16)),
}
