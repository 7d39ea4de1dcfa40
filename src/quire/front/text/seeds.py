"""Seeds of requests and of their completions."""

from __future__ import annotations

import os

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK_64 = 2**64 - 1


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index`; that of the first is the request's.

    The others are successive outputs of SplitMix64 (Steele, Lea and Flood 2014), seeded with `seed`, without
    their lowest bit.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GOLDEN_GAMMA) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) >> 1


def random_seed() -> int:
    """Return a seed for a request that has none."""
    return int.from_bytes(os.urandom(8)) >> 1
