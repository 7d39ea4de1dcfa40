"""The checksum notices what happens to files: flipped bits, torn and exchanged pages, lengths."""

from __future__ import annotations

import operator
from hashlib import blake2b

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.tiers.disk.checksum import _PIECE_WORDS as PIECE
from quire.kv.tiers.disk.checksum import CHECKSUM_BYTES, _keys, checksum

MASK = (1 << 64) - 1


def content_of(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 70), st.integers(0, 3))
def test_the_sums_are_those_of_exact_arithmetic(num_bytes, num_pieces):
    """Python's integers, word by word, against numpy's wrapping products."""
    data = content_of(num_bytes + num_pieces * 8 * PIECE // 2).tobytes()
    num_words = len(data) // 8
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(num_words)]
    plain, mixed = (row.tolist() for row in _keys())
    expected = blake2b(len(data).to_bytes(8, "little"), digest_size=CHECKSUM_BYTES)
    for start in range(0, num_words, PIECE):
        piece = words[start : start + PIECE]
        first = sum(map(operator.mul, plain, piece)) & MASK
        second = sum(map(operator.mul, mixed, [word ^ (word >> 32) for word in piece])) & MASK
        expected.update(first.to_bytes(8, "little") + second.to_bytes(8, "little"))
    expected.update(data[8 * num_words :])
    assert checksum(np.frombuffer(data, dtype=np.uint8)) == expected.digest()


def test_stored_checksums_stay_valid():
    assert checksum(np.arange(256, dtype=np.uint8)).hex() == "9ec45a4856e19107277139699f37c367"


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
