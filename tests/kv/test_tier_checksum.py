"""The checksum notices what happens to files: flipped bits, torn and exchanged pages, lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.tiers.checksum import CHECKSUM_BYTES, _keys, checksum

MASK = (1 << 64) - 1


def content_of(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


@given(st.binary(max_size=70))
def test_the_sums_are_those_of_exact_arithmetic(data):
    """Python's integers, word by word, against numpy's wrapping products."""
    from hashlib import blake2b

    num_words = len(data) // 8
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(num_words)]
    plain, mixed = (row.tolist() for row in _keys(num_words))
    first = sum(key * word for key, word in zip(plain, words, strict=True)) & MASK
    second = sum(key * (word ^ (word >> 32)) for key, word in zip(mixed, words, strict=True)) & MASK
    sums = b"".join(number.to_bytes(8, "little") for number in (first, second, len(data)))
    expected = blake2b(sums + data[8 * num_words :], digest_size=CHECKSUM_BYTES).digest()
    assert checksum(np.frombuffer(data, dtype=np.uint8)) == expected


def test_stored_checksums_stay_valid():
    assert checksum(np.arange(256, dtype=np.uint8)).hex() == "aa36d1857b8c536d28090a33d613cd13"


def test_every_single_flipped_bit_is_noticed():
    content = content_of(93)
    right = checksum(content)
    for bit in range(93 * 8):
        content[bit // 8] ^= 1 << bit % 8
        assert checksum(content) != right
        content[bit // 8] ^= 1 << bit % 8


@given(st.sets(st.integers(0, 511), min_size=1, max_size=64))
def test_flipped_high_bits_do_not_cancel_out(words):
    content = content_of(4096)
    right = checksum(content)
    content[[8 * word + 7 for word in words]] ^= 0x80
    assert checksum(content) != right


def test_pages_that_are_lost_exchanged_or_of_another_block_are_noticed():
    content, other = content_of(8 * 4096), content_of(8 * 4096, seed=1)
    damaged = [content.copy() for _ in range(3)]
    damaged[0][4096:8192] = 0
    damaged[1][:4096], damaged[1][4096:8192] = content[4096:8192], content[:4096]
    damaged[2][5 * 4096 :] = other[5 * 4096 :]
    assert checksum(content) not in [checksum(each) for each in damaged]
    assert checksum(content[:-1]) != checksum(content)
    assert checksum(np.zeros(8, dtype=np.uint8)) != checksum(np.zeros(16, dtype=np.uint8))
