"""Sizes that counts are rounded up to, so that few different ones come up."""

from __future__ import annotations


def size_class(count: int) -> int:
    """Return `count` rounded up to one of four sizes between two powers of two: at most a quarter more."""
    return _rounded_up(count, 4)


def wide_size_class(count: int) -> int:
    """Return `count` rounded up to one of two sizes between two powers of two: at most half more."""
    return _rounded_up(count, 2)


def coarse_size_class(count: int) -> int:
    """Return `count` rounded up to 16, 64, 256 and so on, for what costs next to nothing; 0 stays."""
    return 1 << max(4, -(-(count - 1).bit_length() // 2) * 2) if count else 0


def _rounded_up(count: int, sizes_per_octave: int) -> int:
    step = max(1, (1 << (count - 1).bit_length()) // (2 * sizes_per_octave))
    return -(-count // step) * step
