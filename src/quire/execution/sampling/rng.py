"""Random numbers that depend on nothing but (seed, position): the Philox4x32-10 counter-based generator.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). With a
counter in place of a state, a token draws the same number whatever batch, chunk or restart it is sampled in.
"""

from __future__ import annotations

import numpy as np

from quire.execution.arrays import Float64Array, Int64Array, UInt64Array

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)

Words = tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]


def philox4x32(counter: Words, key: tuple[UInt64Array, UInt64Array]) -> Words:
    """Return four random 32-bit words for each counter and key.

    Args:
        counter: four arrays of 32-bit words, held in uint64, all of one shape.
        key: two arrays of the same kind and shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _WORD_BITS) ^ c1 ^ k0,
            product_1 & _LOW_WORD,
            (product_0 >> _WORD_BITS) ^ c3 ^ k1,
            product_0 & _LOW_WORD,
        )
        k0 = (k0 + _WEYL_0) & _LOW_WORD
        k1 = (k1 + _WEYL_1) & _LOW_WORD
    return c0, c1, c2, c3


def uniforms(seeds: UInt64Array, positions: Int64Array) -> Float64Array:
    """Return one number in [0, 1) for each seed and position, with 53 random bits.

    Args:
        seeds: [R] 64-bit keys.
        positions: [R] the absolute index, in prompt and output, of the token that the number is for.
    """
    position = positions.astype(np.uint64)
    zero = np.zeros_like(position)
    counter = (position & _LOW_WORD, position >> _WORD_BITS, zero, zero)
    high, low, _, _ = philox4x32(counter, (seeds & _LOW_WORD, seeds >> _WORD_BITS))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
