"""What KV events say, against a set of digests; and that vLLM's readers would understand them."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys, root_digest
from quire.kv.blocks.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventCollector,
)

BLOCK = 4


def keys_of(tokens: list[int], salt: str = "") -> list[BlockKey]:
    keys = SequenceKeys(root_digest(salt=salt), BLOCK)
    keys.extend(np.array(tokens, dtype=np.int32))
    return [keys[index] for index in range(len(keys))]


def test_a_run_of_blocks_is_one_event():
    keys = keys_of(list(range(12)))
    collector = KVEventCollector()
    for block_id, key in enumerate(keys):
        collector.stored(block_id, key)
    (event,) = collector.take()
    assert event == BlockStored([key.digest for key in keys], None, list(range(12)), BLOCK)
    assert collector.take() == []


def test_a_later_block_names_its_parent():
    first, second = keys_of(list(range(8)))
    collector = KVEventCollector()
    collector.stored(3, second)
    assert collector.take() == [BlockStored([second.digest], first.digest, [4, 5, 6, 7], BLOCK)]


def test_a_salted_sequence_begins_at_its_salt():
    collector = KVEventCollector()
    collector.stored(0, keys_of([1, 2, 3, 4], salt="tenant")[0])
    (event,) = collector.take()
    assert event.parent_block_hash == root_digest(salt="tenant")


def test_clearing_makes_what_was_before_it_moot():
    first, second = keys_of(list(range(8)))
    collector = KVEventCollector()
    collector.stored(0, first)
    collector.cleared()
    collector.stored(1, second)
    assert [type(event) for event in collector.take()] == [AllBlocksCleared, BlockStored]


operations = st.lists(st.tuples(st.sampled_from("srrsc"), st.integers(0, 9)), max_size=40)


@given(operations)
def test_applying_the_events_gives_the_same_set(calls):
    keys = keys_of(list(range(20))) + keys_of(list(range(100, 120)))
    collector = KVEventCollector()
    held: set[bytes] = set()
    followed: set[bytes] = set()
    for number, (call, index) in enumerate(calls):
        key = keys[index]
        if call == "s" and key.digest not in held:
            collector.stored(index, key)
            held.add(key.digest)
        elif call == "r" and key.digest in held:
            collector.removed(index, key)
            held.remove(key.digest)
        elif call == "c":
            collector.cleared()
            held.clear()
        if number % 3 == 0:
            follow(followed, collector)
    follow(followed, collector)
    assert followed == held


def follow(followed: set[bytes], collector: KVEventCollector) -> None:
    for event in collector.take():
        match event:
            case BlockStored():
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                assert followed.isdisjoint(event.block_hashes)
                followed.update(event.block_hashes)
            case BlockRemoved():
                assert followed.issuperset(event.block_hashes)
                followed.difference_update(event.block_hashes)
            case AllBlocksCleared():
                followed.clear()


def test_the_encoding_is_an_array_with_the_name_first():
    """vLLM's structs are `array_like` with `tag=True`: [name, fields in order]."""
    batch = KVEventBatch(1.5, [BlockStored([b"h"], None, [1], 1), BlockRemoved([b"h"]), AllBlocksCleared()])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [["BlockStored", [b"h"], None, [1], 1], ["BlockRemoved", [b"h"]], ["AllBlocksCleared"]],
    ]
