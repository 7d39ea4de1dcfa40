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


def number_of(key: BlockKey) -> int:
    return int.from_bytes(key.digest[-8:], "big")


def stored(keys: list[BlockKey], parent: int | None, tokens: list[int], **more) -> BlockStored:
    return BlockStored(
        block_hashes=[number_of(key) for key in keys], parent_block_hash=parent, token_ids=tokens,
        block_size=BLOCK, lora_id=None, medium="GPU", lora_name=None, **more,
    )  # fmt: skip


def test_a_run_of_blocks_is_one_event():
    keys = keys_of(list(range(12)))
    collector = KVEventCollector()
    for block_id, key in enumerate(keys):
        collector.stored(block_id, key)
    (event,) = collector.take()
    assert event == stored(keys, None, list(range(12)))
    assert collector.take() == []


def test_a_later_block_names_its_parent():
    first, second = keys_of(list(range(8)))
    collector = KVEventCollector()
    collector.stored(3, second)
    assert collector.take() == [stored([second], number_of(first), [4, 5, 6, 7])]


def test_a_salted_sequence_begins_with_its_salt():
    collector, keys = KVEventCollector(), keys_of(list(range(8)), salt="tenant")
    collector.salted(root_digest(salt="tenant"), "tenant")
    for block_id, key in enumerate(keys):
        collector.stored(block_id, key)
    assert collector.take() == [stored(keys, None, list(range(8)), extra_keys=[["tenant"], None])]


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
    followed: set[int] = set()
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
    assert followed == {int.from_bytes(digest[-8:], "big") for digest in held}


def follow(followed: set[int], collector: KVEventCollector) -> None:
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


def test_the_encoding_is_that_of_vllm():
    """Its events are maps with their name as `type`; fields with None as default are left out."""
    salted = stored(keys_of([1, 2, 3, 4]), 5, [1, 2, 3, 4], extra_keys=[["salt"]])
    events = [salted, BlockRemoved(block_hashes=[2**64 - 1], medium="GPU"), AllBlocksCleared()]
    number = number_of(keys_of([1, 2, 3, 4])[0])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, events))) == [
        1.5,
        [
            {
                "type": "BlockStored", "block_hashes": [number], "parent_block_hash": 5,
                "token_ids": [1, 2, 3, 4], "block_size": 4, "lora_id": None, "medium": "GPU",
                "lora_name": None, "extra_keys": [["salt"]],
            },
            {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        None,
    ]  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, [], 3))) == [1.5, [], 3]
