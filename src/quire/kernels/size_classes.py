"""Sizes that counts are rounded up to, so that few different ones come up."""

from __future__ import annotations


def size_class(count: int) -> int:
    """Return `count` rounded up to one of four sizes between two powers of two: at most a quarter more."""
    step = max(1, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step
