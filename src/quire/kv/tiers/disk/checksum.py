"""A checksum of KV blocks that takes less time than reading them from a fast disk.

Multilinear hashing (Carter and Wegman, "Universal classes of hash functions", 1979; Lemire and Kaser,
"Strongly universal string hashing is fast", 2014) over words of 64 bits with fixed random keys: for each
piece two sums modulo 2^64, over the words and over the words with their halves mixed; then BLAKE2b over the
sums.
Every change within one word is found, because the keys are odd. Changes to several words of a piece go
unnoticed with a probability of at most 2^-33, and of 2^-128 if they are arbitrary. It protects from damage,
not from forgery.
"""

from __future__ import annotations

import functools
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from quire.kv.connectors.host_blocks import ByteArray

CHECKSUM_BYTES = 16
_WORD_BYTES = 8
_PIECE_WORDS = 16_384  # with their keys, they stay in a core's cache


def checksum(content: ByteArray) -> bytes:
    """Return the checksum of a contiguous array of bytes, `CHECKSUM_BYTES` long."""
    words = content[: len(content) // _WORD_BYTES * _WORD_BYTES].view("<u8")
    plain_keys, mixed_keys = _keys()
    mixed = np.empty(min(len(words), _PIECE_WORDS), dtype=np.uint64)
    digest = blake2b(len(content).to_bytes(8, "little"), digest_size=CHECKSUM_BYTES)
    for start in range(0, len(words), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        halves = mixed[: len(piece)]
        np.right_shift(piece, 32, out=halves)
        np.bitwise_xor(piece, halves, out=halves)
        for values, keys in ((piece, plain_keys), (halves, mixed_keys)):
            digest.update(int(np.dot(values, keys[: len(piece)])).to_bytes(8, "little"))
    digest.update(content[len(words) * _WORD_BYTES :].tobytes())
    return digest.digest()


@functools.cache
def _keys() -> npt.NDArray[np.uint64]:
    """Return the keys of both sums, [2, words of a piece]: always the same, because checksums are stored."""
    raw = np.random.Philox(key=0x517E).random_raw(2 * _PIECE_WORDS)
    keys: npt.NDArray[np.uint64] = raw.reshape(2, _PIECE_WORDS) | np.uint64(1)
    return keys
