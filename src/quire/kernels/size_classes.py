"""Sizes that counts are rounded up to, so that few different ones come up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`, which is at least 1.

    Triton's function of this name is one of its compiler's, too, and takes ten times as long on the host.
    """
    return 1 << (count - 1).bit_length()


def size_class(count: int) -> int:
    """Return `count` rounded up to one of four sizes between two powers of two: at most a quarter more."""
    return _rounded_up(count, 4)


def wide_size_class(count: int) -> int:
    """Return `count` rounded up to one of two sizes between two powers of two: at most half more."""
    return _rounded_up(count, 2)


def coarse_size_class(count: int, least: int = 16) -> int:
    """Return `count` rounded up to 16, 64, 256 and so on, and to `least`, which is one of these; 0 stays."""
    return max(least, 1 << -(-(count - 1).bit_length() // 2) * 2) if count else 0


class SizeClasses(NamedTuple):
    """How the sizes of a step are rounded up."""

    rows: Callable[[int], int]  # of the step's tensors, and both sides of its block tables
    plans: Callable[[int], int]  # pieces that attention is cut into; those that are added do nothing
    parts: Callable[[int], int]  # what is kept of pieces; those that are added take only memory


DECODE_SIZES = SizeClasses(size_class, size_class, size_class)
EXACT_SIZES = SizeClasses(int, int, int)  # where padding costs more than captures of many sizes
CHUNK_SIZES = SizeClasses(  # of steps with chunks of prompts
    wide_size_class, coarse_size_class, functools.partial(coarse_size_class, least=256)
)


def _rounded_up(count: int, sizes_per_octave: int) -> int:
    step = max(1, next_power_of_2(count) // (2 * sizes_per_octave))
    return -(-count // step) * step
