"""Pulls of slots: what is pulled, where to, and what becomes of the key."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import sides
from conformance import row
from failing import fails_with
from pair_checks import (
    PLACEHOLDER,
    assert_gone,
    assert_pullable,
    assert_slot,
    bound,
    bound_only,
    free_on_prompt,
    prefix_key,
)
from sides import POOL, byte_desc, pattern, read_cache, write_new_cache

from quire.datadist import (
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMStatusCode,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK


@row("E40")
def test_a_key_that_is_not_there_fails_at_once(pair):
    desc = byte_desc(2)
    bound(pair, desc, [CacheKey(1, 5), CacheKey(1, 6)], seed=9)
    assert_pullable(pair, CacheKey(1, 5), desc, 0, seed=9)
    pair.pm.remove_cache_key(CacheKey(1, 6))
    start = time.monotonic()
    for key in (CacheKey(1, 5), CacheKey(1, 6), CacheKey(1, 7), CacheKeyByIdAndIndex(1, 77), prefix_key(5)):
        assert_gone(pair, key)
    assert time.monotonic() - start < sides.PATIENT / 1000 / 2


@row("E42")
def test_pull_from_a_cluster_that_is_not_linked(make_pair):
    pair = make_pair(linked=False)
    bound(pair, byte_desc(1), [CacheKey(1, 5)], seed=1)
    target = write_new_cache(pair.dm, byte_desc(1), seed=2)
    for key in (CacheKey(1, 5), CacheKey(77, 5), CacheKeyByIdAndIndex(1, 1), CacheKeyByIdAndIndex(77, 1)):
        with fails_with(NOT_YET):
            pair.dm.pull_cache(key, target)
    pair.link()
    with fails_with(NOT_YET):
        pair.dm.pull_cache(CacheKey(77, 5), target)
    assert_slot(pair, target, 0, pattern(byte_desc(1), 2)[:, 0])
    assert_pullable(pair, CacheKey(1, 5), byte_desc(1), 0, seed=1)


@row("E43")
def test_sizes_that_do_not_fit(pair):
    source, key = byte_desc(2, 48), CacheKey(1, 5)  # what is behind the slot is another's
    bound(pair, source, [key], seed=1)
    larger, smaller = (write_new_cache(pair.dm, byte_desc(2, size), seed=2) for size in (64, 32))
    for size in (0, -2):
        with pytest.raises(ValueError, match=r"\w"):
            pair.dm.pull_cache(key, larger, size=size)
    for target, size in ((larger, 49), (larger, 65), (smaller, 33)):
        with fails_with(INVALID):
            pair.dm.pull_cache(key, target, size=size)
    for target, slot_bytes in ((larger, 64), (smaller, 32)):
        np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(byte_desc(2, slot_bytes), 2))
    assert_pullable(pair, key, source, 0, seed=1)


@row("E43")
def test_an_explicit_size_consumes_the_key(pair):
    source, key = byte_desc(1, 48), CacheKey(1, 5)
    bound(pair, source, [key], seed=1)
    target = write_new_cache(pair.dm, byte_desc(2, 64), seed=2)
    pair.dm.pull_cache(key, target, 1, 5)
    expected = pattern(byte_desc(2, 64), 2)
    expected[:, 1, :5] = pattern(source, 1)[:, 0, :5]
    np.testing.assert_array_equal(read_cache(pair.dm, target), expected)
    assert_gone(pair, key)


@row("E44")
def test_a_destination_of_another_size(pair):
    source, key = byte_desc(2, 48), CacheKey(1, 5)
    bound(pair, source, [key], seed=1)
    larger = write_new_cache(pair.dm, byte_desc(1, 49), seed=2)
    with fails_with(INVALID):
        pair.dm.pull_cache(key, larger)
    assert_slot(pair, larger, 0, pattern(byte_desc(1, 49), 2)[:, 0])
    smaller = CacheDesc(4, [1, 4, 8], DataType.DT_UINT8)  # of another shape, too
    target = pair.dm.allocate_cache(smaller)
    pair.dm.pull_cache(key, target)
    assert_slot(pair, target, 0, pattern(source, 1)[:, 0, :32])
    assert_gone(pair, key)


@row("E45")
@pytest.mark.parametrize(
    ("options", "source", "destination"),
    [
        ({"src_cache_offset": 0}, slice(0, 64), slice(0, 64)),
        ({"dst_cache_offset": 0}, slice(0, 64), slice(0, 64)),
        ({"dst_cache_offset": 60}, slice(0, 4), slice(60, 64)),
        ({"src_cache_offset": 8, "dst_cache_offset": 10}, slice(8, 62), slice(10, 64)),
        ({"src_cache_offset": 8, "size": 3}, slice(8, 11), slice(0, 3)),
        ({"src_cache_offset": 63, "dst_cache_offset": 1, "size": 1}, slice(63, 64), slice(1, 2)),
    ],
)
def test_a_pull_with_an_offset_keeps_the_key(pair, options, source, destination):
    desc, key = byte_desc(2, 64), CacheKey(1, 5)
    bound(pair, desc, [PLACEHOLDER, key], seed=1)
    target = write_new_cache(pair.dm, desc, seed=2)
    pair.dm.pull_cache(key, target, batch_index=1, **options)
    expected = pattern(desc, 2)
    expected[:, 1, destination] = pattern(desc, 1)[:, 1, source]
    np.testing.assert_array_equal(read_cache(pair.dm, target), expected)
    assert_pullable(pair, key, desc, 1, seed=1)
    assert_gone(pair, key)


@row("E45")
@pytest.mark.parametrize(
    ("source", "destination", "per_layer"),
    [
        (range(0, 3), range(0, 3), None),
        (range(1, 3), range(0, 2), None),
        (range(2, 3), range(0, 1), 2),
        (range(0, 2), range(4, 6), 1),
        (range(1, 2), range(0, 1), 3),
        (range(0, 1), range(0, 1), 6),
    ],
)
def test_a_pull_of_some_layers_keeps_the_key(pair, source, destination, per_layer):
    desc, key = byte_desc(1, 16, 6), CacheKey(1, 5)
    bound(pair, desc, [key], seed=1)
    target = write_new_cache(pair.dm, desc, seed=2)
    options = {} if per_layer is None else {"tensor_num_per_layer": per_layer}
    pair.dm.pull_cache(key, target, src_layer_range=source, dst_layer_range=destination, **options)
    expected, num = pattern(desc, 2), per_layer or 2
    rows = slice(destination.start * num, destination.stop * num)
    expected[rows] = pattern(desc, 1)[source.start * num : source.stop * num]
    np.testing.assert_array_equal(read_cache(pair.dm, target), expected)
    assert_pullable(pair, key, desc, 0, seed=1)


@row("E45")
def test_offsets_past_the_end_of_a_slot(pair):
    desc, key = byte_desc(2, 64), CacheKey(1, 5)
    bound(pair, desc, [key], seed=1)
    target = write_new_cache(pair.dm, desc, seed=2)
    for options in (
        {"src_cache_offset": 1},  # the rest of the destination is more than is left there
        {"src_cache_offset": 60, "size": 5},
        {"dst_cache_offset": 60, "size": 5},
        {"dst_cache_offset": 64},
        {"src_cache_offset": 65, "size": 1},
        {"src_cache_offset": 2**62, "dst_cache_offset": 0, "size": 1},
    ):
        with fails_with(INVALID):
            pair.dm.pull_cache(key, target, **options)
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 2))
    assert_pullable(pair, key, desc, 0, seed=1)


@row("E46")
def test_bad_ranges_of_layers(pair):
    desc, key = byte_desc(1, 16, 6), CacheKey(1, 5)
    bound(pair, desc, [key], seed=1)
    target = write_new_cache(pair.dm, desc, seed=2)
    for source, destination, options in (
        (range(0, 3, 2), range(0, 3, 2), {}),
        (range(2, 0, -1), range(2, 0, -1), {}),
        (range(0, 2), range(0, 1), {}),
        (range(2, 4), range(0, 2), {}),
        (range(0, 2), range(2, 4), {}),
        (range(0, 1), None, {}),
        (range(0, 1), range(0, 1), {"tensor_num_per_layer": 4}),
        (range(0, 1), range(0, 1), {"tensor_num_per_layer": 7}),
    ):
        with fails_with(INVALID):
            pair.dm.pull_cache(key, target, src_layer_range=source, dst_layer_range=destination, **options)
    assert_slot(pair, target, 0, pattern(desc, 2)[:, 0])
    assert_pullable(pair, key, desc, 0, seed=1)


@row("E46")
def test_the_tensors_of_a_layer_do_not_matter_without_a_range(pair):
    desc, key = byte_desc(1, 16, 6), CacheKey(1, 5)
    bound(pair, desc, [key], seed=1)
    target = pair.dm.allocate_cache(desc)
    pair.dm.pull_cache(key, target, tensor_num_per_layer=4)
    assert_slot(pair, target, 0, pattern(desc, 1)[:, 0])
    assert_gone(pair, key)


@row("E47")
def test_a_destination_that_does_not_match(pair):
    key = CacheKey(1, 5)
    source = CacheDesc(4, [1, 8], DataType.DT_FLOAT)
    bound(pair, source, [key], seed=1)
    for desc, index in (
        (CacheDesc(4, [2, 8], DataType.DT_FLOAT), 2),
        (CacheDesc(2, [2, 8], DataType.DT_FLOAT), 0),
        (CacheDesc(6, [2, 8], DataType.DT_FLOAT), 0),
        (CacheDesc(4, [2, 8], DataType.DT_INT32), 0),
        (CacheDesc(4, [2, 16], DataType.DT_FLOAT16), 0),
    ):
        target = write_new_cache(pair.dm, desc, seed=2)
        with fails_with(INVALID):
            pair.dm.pull_cache(key, target, batch_index=index)
        np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 2))
    assert_pullable(pair, key, source, 0, seed=1)


@row("E48")
def test_a_placeholder_cannot_be_pulled(pair):
    bound(pair, byte_desc(1), [PLACEHOLDER], seed=1)
    target = pair.dm.allocate_cache(byte_desc(1))
    with fails_with(INVALID):
        pair.dm.pull_cache(PLACEHOLDER, target)


@row("E49", "CacheKeyByIdAndIndex")
def test_pull_by_id(pair):
    desc, key = byte_desc(2), CacheKey(1, 5)
    cache = bound(pair, desc, [PLACEHOLDER, key], seed=1)
    for slot in (1, 0, 1):
        assert_pullable(pair, CacheKeyByIdAndIndex(1, cache.cache_id, slot), desc, slot, seed=1)
    target = pair.dm.allocate_cache(byte_desc(1))
    with pytest.raises(LLMException):
        pair.dm.pull_cache(CacheKeyByIdAndIndex(1, cache.cache_id, 2), target)
    pair.pm.deallocate_cache(cache)
    assert_gone(pair, CacheKeyByIdAndIndex(1, cache.cache_id, 1))
    assert_pullable(pair, key, desc, 1, seed=1)


@row("E50")
def test_a_prefix_is_pulled_until_it_is_removed(pair):
    desc, key = byte_desc(1), prefix_key(7)
    bound_only(pair, desc, [key], seed=1)
    for _ in range(2):
        assert_pullable(pair, key, desc, 0, seed=1)
    assert_pullable(pair, CacheKey(1, 1234, prefix_id=7), desc, 0, seed=1)  # whatever the request
    pair.pm.remove_cache_key(key)
    assert_gone(pair, key)
    assert free_on_prompt(pair) == POOL


@row("E51")
def test_keys_of_different_kinds_and_models_do_not_collide(pair):
    desc = byte_desc(4)
    keys = [CacheKey(1, 5), prefix_key(5), CacheKey(1, 5, model_id=1), prefix_key(5, model_id=1)]
    bound_only(pair, desc, keys, seed=1)
    for slot in (2, 1, 3, 0):
        assert_pullable(pair, keys[slot], desc, slot, seed=1)
    assert_gone(pair, keys[0])
    assert_gone(pair, keys[2])
    assert_pullable(pair, keys[1], desc, 1, seed=1)


@row("E40")
def test_two_decoders_that_pull_one_key_at_once(pair):
    other = sides.start_decoder(3, transport=pair.transport)
    try:
        assert other.link_clusters([pair.peer], sides.PATIENT)[0] == LLMStatusCode.LLM_SUCCESS
        managers = pair.dm, other.kv_cache_manager
        targets = [manager.allocate_cache(byte_desc(1)) for manager in managers]
        for number in range(10):
            key, got = CacheKey(1, number), []
            bound_only(pair, byte_desc(1), [key], seed=number)
            both = threading.Barrier(2)

            def pull(manager, target, key=key, got=got, both=both) -> None:
                both.wait()
                try:
                    manager.pull_cache(key, target)
                    got.append(read_cache(manager, target))
                except LLMException as error:
                    assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
                    got.append(None)

            threads = [
                threading.Thread(target=pull, args=pulling) for pulling in zip(managers, targets, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(got) == 2
            # The key is released after its pull is complete: until then, the other pull reads it too.
            received = [bytes_ for bytes_ in got if bytes_ is not None]
            assert received
            for bytes_ in received:
                np.testing.assert_array_equal(bytes_, pattern(byte_desc(1), number))
            assert_gone(pair, key)
        assert free_on_prompt(pair) == POOL
    finally:
        other.finalize()


@row("E40")
def test_many_threads_pull_one_key_after_another(pair):
    desc = byte_desc(16)
    bound_only(pair, desc, [CacheKey(1, slot) for slot in range(16)], seed=1)
    target = pair.dm.allocate_cache(desc)

    def pull(first: int) -> None:
        for slot in range(first, 16, 4):
            pair.dm.pull_cache(CacheKey(1, slot), target, slot)

    threads = [threading.Thread(target=pull, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 1))
    assert free_on_prompt(pair) == POOL
