from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys, root_digest

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def keys_of(tokens: list[int], block_size: int, salt: str = "") -> list[BlockKey]:
    keys = SequenceKeys(root_digest(salt=salt), block_size)
    keys.extend(np.array(tokens, np.int32))
    return [keys[index] for index in range(len(keys))]


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_keys_are_equal_exactly_where_the_histories_are(left, right, block_size):
    left_keys, right_keys = keys_of(left, block_size), keys_of(right, block_size)
    assert len(left_keys) == len(left) // block_size
    for index, (one, other) in enumerate(zip(left_keys, right_keys, strict=False)):
        end = (index + 1) * block_size
        assert (one == other) == (left[:end] == right[:end])
        assert (one.digest == other.digest) == (left[:end] == right[:end])


@given(TOKENS, st.integers(1, 5), st.integers(0, 24))
def test_extending_in_two_goes_is_extending_in_one(tokens, block_size, split):
    keys = SequenceKeys(root_digest(), block_size)
    keys.extend(np.array(tokens[:split], np.int32))
    keys.extend(np.array(tokens[len(keys) * block_size :], np.int32))
    assert [keys[index] for index in range(len(keys))] == keys_of(tokens, block_size)


def test_extra_keys_separate_and_cannot_imitate_each_other():
    roots = [
        root_digest(),
        root_digest(salt="a"),
        root_digest(adapter="a"),
        root_digest(salt="a", adapter="b"),
        root_digest(salt="b", adapter="a"),
        root_digest(salt="aadapter", adapter="b"),
    ]
    assert len(set(roots)) == len(roots)
    assert root_digest(salt="") == root_digest()
    assert keys_of([1, 2], 2, "tenant") != keys_of([1, 2], 2)


def test_a_digest_is_blake2b_over_the_parent_and_little_endian_tokens():
    root = hashlib.blake2b(digest_size=16).digest()
    tokens = np.array([1, 2, 3, 4], "<i4").tobytes()
    assert keys_of([1, 2, 3, 4], 4)[0].digest == hashlib.blake2b(root + tokens, digest_size=16).digest()
