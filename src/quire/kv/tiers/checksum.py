"""A checksum of KV blocks that is about as fast as reading them from memory.

Multilinear hashing (Carter and Wegman, "Universal classes of hash functions", 1979; Lemire and Kaser,
"Strongly universal string hashing is fast", 2014) over words of 64 bits with fixed random keys: two sums
modulo 2^64, over the words and over the words with their halves mixed. Every change within one word is found,
because the keys are odd. Changes to several words at once go unnoticed with a probability of at most 2^-33,
and of 2^-128 if they are arbitrary. It protects from damage, not from forgery.
"""

from __future__ import annotations

import functools
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from quire.kv.host_blocks import ByteArray

CHECKSUM_BYTES = 16
_WORD_BYTES = 8


def checksum(content: ByteArray) -> bytes:
    """Return the checksum of a contiguous array of bytes, `CHECKSUM_BYTES` long."""
    num_words, num_left = divmod(len(content), _WORD_BYTES)
    words = content[: num_words * _WORD_BYTES].view("<u8")
    keys = _keys(num_words)
    mixed = words >> 32
    mixed ^= words
    sums = (int(np.dot(words, keys[0])), int(np.dot(mixed, keys[1])), len(content))
    rest = content[len(content) - num_left :].tobytes()
    return blake2b(
        b"".join(number.to_bytes(8, "little") for number in sums) + rest, digest_size=CHECKSUM_BYTES
    ).digest()


@functools.lru_cache(maxsize=4)
def _keys(num_words: int) -> npt.NDArray[np.uint64]:
    """Return the keys of both sums, [2, words]: always the same, because checksums are stored."""
    raw = np.random.Philox(key=0x517E).random_raw(2 * num_words)
    keys: npt.NDArray[np.uint64] = raw.reshape(2, num_words) | np.uint64(1)
    return keys
