"""Blocks caches: pulls by block tables, and copies of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import sides
from conformance import row
from failing import fails_with
from pair_checks import bound_blocks, free_on_prompt, prefix_key
from sides import POOL, byte_desc, num_free_bytes, pattern, read_cache, write_new_blocks, write_new_cache

from quire.datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
KEY = BlocksCacheKey(1)


@row("E57", "BlocksCacheKey")
def test_one_blocks_cache_per_model(pair):
    desc = byte_desc(3)
    first = bound_blocks(pair, desc, KEY, seed=1)
    other_model = bound_blocks(pair, desc, BlocksCacheKey(1, 1), seed=2)
    free = free_on_prompt(pair)
    for key in (KEY, BlocksCacheKey(1, 1), BlocksCacheKey(9)):
        with fails_with(LLMStatusCode.LLM_REPEAT_REQUEST):
            pair.pm.allocate_blocks_cache(desc, key)
    assert free_on_prompt(pair) == free
    target = pair.dm.allocate_blocks_cache(desc)
    for model_id, seed in ((1, 2), (0, 1)):
        pair.dm.pull_blocks(BlocksCacheKey(1, model_id), target, [0, 1, 2], [0, 1, 2])
        np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, seed))
    assert first.cache_id != other_model.cache_id


@row("E57")
def test_a_decoder_has_no_key_for_blocks_and_a_prompt_pulls_none(prompt, decoder):
    pm, dm = prompt.kv_cache_manager, decoder.kv_cache_manager
    with fails_with(INVALID):
        dm.allocate_blocks_cache(byte_desc(), KEY)
    assert num_free_bytes(dm) == POOL
    with fails_with(INVALID):
        pm.pull_blocks(KEY, pm.allocate_blocks_cache(byte_desc()), [0], [0])


@row("E58")
def test_bad_lists_of_blocks(pair):
    desc = byte_desc(4)
    source = bound_blocks(pair, desc, KEY, seed=1)
    target = write_new_blocks(pair.dm, desc, seed=2)
    for prompt_blocks, decoder_blocks in (
        ([0, 1], [0]),
        ([], [0]),
        ([0, 1], [2, 2]),
        ([0], [4]),
        ([4], [0]),
        ([0, 2**63], [0, 1]),
        ([0, 1, 2, 3, 0], [0, 1, 2, 3, 4]),
    ):
        with fails_with(INVALID):
            pair.dm.pull_blocks(KEY, target, prompt_blocks, decoder_blocks)
    pair.dm.pull_blocks(KEY, target, [], [])
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 2))
    pair.dm.pull_blocks(KEY, target, [3, 0, 3], [0, 1, 2])  # the link still works
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, :3], pattern(desc, 1)[:, [3, 0, 3]])
    pair.pm.deallocate_cache(source)


@row("E58")
def test_blocks_of_another_kind(pair):
    source = bound_blocks(pair, CacheDesc(4, [4, 8], DataType.DT_FLOAT), KEY, seed=1)
    for desc in (
        CacheDesc(4, [4, 9], DataType.DT_FLOAT),
        CacheDesc(4, [4, 7], DataType.DT_FLOAT),
        CacheDesc(4, [4, 8], DataType.DT_INT32),
        CacheDesc(2, [4, 8], DataType.DT_FLOAT),
    ):
        target = write_new_blocks(pair.dm, desc, seed=2)
        with fails_with(INVALID):
            pair.dm.pull_blocks(KEY, target, [0], [0])
        np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 2))
    fewer = CacheDesc(4, [2, 2, 4], DataType.DT_FLOAT)  # another number of blocks of the same size
    target = pair.dm.allocate_blocks_cache(fewer)
    pair.dm.pull_blocks(KEY, target, [3], [1])
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, 1], pattern(source.cache_desc, 1)[:, 3])


@row("E59")
def test_the_same_blocks_twice(pair):
    desc = byte_desc(6, 40)
    source = bound_blocks(pair, desc, KEY, seed=1)
    target = write_new_blocks(pair.dm, desc, seed=2)
    expected = pattern(desc, 2)
    for prompt_blocks, decoder_blocks in (([4, 0, 5], [1, 3, 5]), ([4, 0, 5], [5, 1, 0])):
        pair.dm.pull_blocks(KEY, target, prompt_blocks=prompt_blocks, decoder_blocks=decoder_blocks)
        expected[:, decoder_blocks] = pattern(desc, 1)[:, prompt_blocks]
        np.testing.assert_array_equal(read_cache(pair.dm, target), expected)
    np.testing.assert_array_equal(pair.call(read_cache, pair.pm, source), pattern(desc, 1))


@row("E59")
@pytest.mark.parametrize("num_blocks", [1, 7, 257])
def test_any_number_of_blocks_in_any_order(make_pair, num_blocks):
    pair = make_pair(pool=1 << 20)
    desc = byte_desc(num_blocks, 129, 2)
    source = bound_blocks(pair, desc, KEY, seed=1)
    target = pair.dm.allocate_blocks_cache(desc)
    order = np.random.default_rng(3).permutation(num_blocks).tolist()
    pair.dm.pull_blocks(KEY, target, list(range(num_blocks)), order)
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, order], pattern(desc, 1))
    pair.dm.pull_blocks(KEY, target, list(range(num_blocks)), list(range(num_blocks)))
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 1))
    assert source.cache_id == 1


@row("any sequence or integer array is a list of blocks")
@pytest.mark.parametrize(
    "make",
    [tuple, lambda blocks: np.array(blocks, np.int32), lambda blocks: range(blocks[0], blocks[-1] + 1)],
    ids=["tuple", "array", "range"],
)
def test_other_lists_of_blocks(pair, make):
    desc = byte_desc(5)
    source = bound_blocks(pair, desc, KEY, seed=1)
    target = write_new_blocks(pair.dm, desc, seed=2)
    pair.dm.pull_blocks(KEY, target, make([2, 3]), make([0, 1]))
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, :2], pattern(desc, 1)[:, 2:4])
    pair.dm.copy_blocks(target, {4: make([2, 3])})
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, 3], pattern(desc, 2)[:, 4])
    assert source.cache_id == 1


@row("E59")
@pytest.mark.parametrize(
    ("source_layers", "target_layers", "options"),
    [
        (range(1, 2), range(0, 1), {}),
        (range(0, 2), range(1, 3), {"tensor_num_per_layer": 2}),
        (range(0, 4), range(2, 6), {"tensor_num_per_layer": 1}),
    ],
)
def test_blocks_of_some_layers(pair, source_layers, target_layers, options):
    desc, num = byte_desc(3, 16, 6), options.get("tensor_num_per_layer", 2)
    source = bound_blocks(pair, desc, KEY, seed=1)
    target = write_new_blocks(pair.dm, desc, seed=2)
    ranges = {"src_layer_range": source_layers, "dst_layer_range": target_layers}
    pair.dm.pull_blocks(KEY, target, [2, 0], [0, 1], **ranges, **options)
    expected, given = pattern(desc, 2), pattern(desc, 1)
    rows = slice(target_layers.start * num, target_layers.stop * num)
    expected[rows, :2] = given[source_layers.start * num : source_layers.stop * num, [2, 0]]
    np.testing.assert_array_equal(read_cache(pair.dm, target), expected)
    for bad in (range(0, 2, 2), range(0, 2), range(2, 5)):
        with fails_with(INVALID):
            pair.dm.pull_blocks(KEY, target, [0], [0], src_layer_range=bad, dst_layer_range=range(0, 1))
    np.testing.assert_array_equal(read_cache(pair.dm, target), expected)
    assert source.cache_id == 1


@row("pull_blocks by any key")
def test_blocks_are_named_by_a_key_of_each_kind(pair):
    desc = byte_desc(4)
    source = bound_blocks(pair, desc, KEY, seed=1)
    slots = pair.call(write_new_cache, pair.pm, byte_desc(2, 200), [CacheKey(1, 5), prefix_key(6)], seed=3)
    blocks, longer = pattern(desc, 1), pattern(byte_desc(2, 200), 3)
    for key, source_blocks, expected in (
        (KEY, [3, 1], blocks[:, [3, 1]]),
        (CacheKeyByIdAndIndex(1, source.cache_id), [3, 1], blocks[:, [3, 1]]),
        (CacheKey(1, 5), [], longer[:, 0, :128].reshape(4, 2, 64)),
        (prefix_key(6), [], longer[:, 1, :128].reshape(4, 2, 64)),
        (CacheKeyByIdAndIndex(1, slots.cache_id, 1), [], longer[:, 1, :128].reshape(4, 2, 64)),
    ):
        for _ in range(2):  # no key is consumed
            target = write_new_blocks(pair.dm, desc, seed=2)
            pair.dm.pull_blocks(key, target, source_blocks, [2, 0])
            np.testing.assert_array_equal(read_cache(pair.dm, target)[:, [2, 0]], expected)
            np.testing.assert_array_equal(read_cache(pair.dm, target)[:, [1, 3]], pattern(desc, 2)[:, [1, 3]])
        some = {"src_layer_range": range(1, 2), "dst_layer_range": range(0, 1)}
        pair.dm.pull_blocks(key, target, src_blocks=source_blocks, dst_blocks=[2, 0], **some)
        np.testing.assert_array_equal(read_cache(pair.dm, target)[:2, [2, 0]], expected[2:])
    pair.dm.pull_blocks(CacheKey(1, 5), target, dst_blocks=[])
    pair.dm.pull_blocks(CacheKey(1, 5), target, dst_blocks=[1])
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, 1], longer[:, 0, :64])


@row("pull_blocks by any key")
def test_keys_that_do_not_fit_their_blocks(pair):
    desc = byte_desc(4)
    source = bound_blocks(pair, desc, KEY, seed=1)
    slots = pair.call(write_new_cache, pair.pm, desc, [CacheKey(1, 5)], seed=3)
    target = write_new_blocks(pair.dm, desc, seed=2)
    for key, source_blocks, target_blocks in (
        (CacheKey(1, 5), [0], [0]),
        (CacheKey(1, 5), [], [0, 1]),  # the slot has the bytes of one block
        (CacheKey(1, 2**64 - 1), [], [0]),
        (CacheKeyByIdAndIndex(1, source.cache_id, 1), [0], [0]),
        (CacheKeyByIdAndIndex(1, source.cache_id), [], [0]),
        (CacheKeyByIdAndIndex(1, source.cache_id), [4], [0]),
        (CacheKeyByIdAndIndex(1, slots.cache_id), [0], [0]),
        (KEY, [], [0]),
    ):
        with fails_with(INVALID):
            pair.dm.pull_blocks(key, target, source_blocks, target_blocks)
    with fails_with(NOT_EXIST):
        pair.dm.pull_blocks(CacheKeyByIdAndIndex(1, 99), target, [0], [0])
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 2))


@row("pull_blocks by any key")
def test_both_spellings_of_keywords(pair):
    desc = byte_desc(4)
    source = bound_blocks(pair, desc, KEY, seed=1)
    target = pair.dm.allocate_blocks_cache(desc)
    pair.dm.pull_blocks(prompt_cache_key=KEY, decoder_kv_cache=target, prompt_blocks=[1], decoder_blocks=[0])
    pair.dm.pull_blocks(src_cache_key=KEY, dst_cache=target, src_blocks=[2], dst_blocks=[1])
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, :2], pattern(desc, 1)[:, [1, 2]])
    for wrong in (
        {"src_cache_key": KEY, "prompt_cache_key": KEY, "dst_cache": target, "dst_blocks": []},
        {"src_cache_key": KEY, "dst_cache": target, "dst_blocks": [], "src_blocks": [], "prompt_blocks": []},
        {"dst_cache": target, "dst_blocks": []},
        {"src_cache_key": KEY, "dst_blocks": []},
        {"src_cache_key": KEY, "dst_cache": target},
        {"src_cache_key": KEY, "dst_cache": target, "dst_blocks": [], "src_layer_range": [0]},
        {"src_cache_key": KEY, "dst_cache": target, "dst_blocks": [], "size": 1},
    ):
        with pytest.raises(TypeError):
            pair.dm.pull_blocks(**wrong)
    assert source.cache_id == 1


@row("E60")
def test_a_deallocated_blocks_cache_is_gone_at_once(pair):
    desc = byte_desc(2)
    source = bound_blocks(pair, desc, KEY, seed=1)
    target = write_new_blocks(pair.dm, desc, seed=2)
    pair.pm.deallocate_cache(source)
    with fails_with(NOT_EXIST):
        pair.dm.pull_blocks(KEY, target, [0], [0])
    with fails_with(NOT_EXIST):
        pair.dm.pull_blocks(BlocksCacheKey(1, 5), target, [0], [0])
    assert free_on_prompt(pair) == POOL
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 2))
    again = bound_blocks(pair, desc, KEY, seed=3)
    pair.dm.pull_blocks(KEY, target, [1], [0])
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, 0], pattern(desc, 3)[:, 1])
    assert again.cache_id != source.cache_id


@row("E58")
def test_blocks_of_a_cluster_that_is_not_linked(pair):
    target = pair.dm.allocate_blocks_cache(byte_desc())
    with fails_with(LLMStatusCode.LLM_NOT_YET_LINK):
        pair.dm.pull_blocks(BlocksCacheKey(77), target, [0], [0])


@row("E61")
def test_copies_read_before_they_write(decoder):
    dm = decoder.kv_cache_manager
    desc = byte_desc(6)
    cache = write_new_blocks(dm, desc, seed=1)
    before = pattern(desc, 1)
    dm.copy_blocks(cache, {1: [2], 2: [3]})
    np.testing.assert_array_equal(read_cache(dm, cache), before[:, [0, 1, 1, 2, 4, 5]])
    dm.copy_blocks(cache, {0: [1, 2], 5: [0], 4: [5, 4]})
    np.testing.assert_array_equal(read_cache(dm, cache), before[:, [5, 0, 0, 2, 4, 4]])


@row("E61")
def test_bad_copies_write_nothing(decoder):
    dm = decoder.kv_cache_manager
    desc = byte_desc(4)
    cache = write_new_blocks(dm, desc, seed=1)
    twice, outside = (
        ({0: [1], 2: [1]}, {0: [1, 1]}),
        ({0: [1, 4]}, {0: [1], 4: [2]}, {0: [1], 2: [2**63]}, {4: []}),
    )
    for blocks in (*twice, *outside):
        with fails_with(INVALID):
            dm.copy_blocks(cache, blocks)
    dm.copy_blocks(cache, {})
    dm.copy_blocks(cache, {1: []})
    np.testing.assert_array_equal(read_cache(dm, cache), pattern(desc, 1))


@row("E62")
def test_each_kind_of_cache_has_its_own_calls(pair):
    desc = byte_desc(2)
    blocks = bound_blocks(pair, desc, KEY, seed=1)
    slots = pair.call(write_new_cache, pair.pm, desc, [CacheKey(1, 5)], seed=2)
    own_slots, own_blocks = pair.dm.allocate_cache(desc), pair.dm.allocate_blocks_cache(desc)
    for call in (
        lambda: pair.dm.pull_blocks(KEY, own_slots, [0], [0]),
        lambda: pair.dm.pull_blocks(KEY, own_slots, [], []),
        lambda: pair.dm.pull_cache(CacheKey(1, 5), own_blocks),
        lambda: pair.dm.copy_cache(own_slots, own_blocks),
        lambda: pair.dm.copy_cache(own_blocks, own_slots),
        lambda: pair.dm.copy_blocks(own_slots, {0: [1]}),
    ):
        with fails_with(INVALID):
            call()
    for cache in (own_slots, own_blocks):
        assert not read_cache(pair.dm, cache).any()
    pair.dm.pull_cache(CacheKey(1, 5), own_slots, 1)
    assert blocks.cache_id != slots.cache_id


@row("E62")
def test_memory_of_blocks_is_zero_and_counted(decoder):
    dm = decoder.kv_cache_manager
    desc = byte_desc(4)
    cache = write_new_blocks(dm, desc, seed=1)
    assert num_free_bytes(dm) == POOL - desc.num_tensors * desc.tensor_bytes
    dm.deallocate_cache(cache)
    dm.deallocate_cache(cache)
    assert num_free_bytes(dm, sides.POOL) == POOL
    assert not read_cache(dm, dm.allocate_blocks_cache(desc)).any()
