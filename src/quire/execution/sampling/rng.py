"""Random numbers that depend on nothing but (seed, position): the Philox4x32-10 counter-based generator.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). With a
counter in place of a state, a token draws the same number whatever batch, chunk or restart it is sampled in.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.arrays import Float64Array, UInt64Array
from quire.step import Int64Array

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_KEY_STEPS = (np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL).astype("<u4")  # [rounds, 2, 1]
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)

Words = tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]


def philox4x32(counter: Words, key: tuple[UInt64Array, UInt64Array]) -> Words:
    """Return four random 32-bit words for each counter and key.

    Args:
        counter: four arrays [R] of 32-bit words, held in uint64.
        key: two of the same kind.
    """
    round_keys = np.array(key, dtype="<u4") + _KEY_STEPS
    even, odd = np.array(counter[::2], dtype="<u4"), np.array(counter[1::2], dtype="<u4")
    for round_key in round_keys:
        halves = (even * _MULTIPLIERS).view("<u4")[::-1]  # of each product the low word, then the high one
        even = halves[:, 1::2] ^ odd
        even ^= round_key
        odd = halves[:, ::2]
    high, low = even.astype(np.uint64), odd.astype(np.uint64)
    return high[0], low[0], high[1], low[1]


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
