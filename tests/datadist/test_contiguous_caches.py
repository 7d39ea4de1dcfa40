"""Contiguous caches: keys, copies, and what holds their memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import sides
import torch
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
from sides import POOL, byte_desc, fits, num_free_bytes, pattern, read_cache, write_cache, write_new_cache

from quire.datadist import (
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMStatusCode,
    Placement,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
REPEAT = LLMStatusCode.LLM_REPEAT_REQUEST
OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


@row("E30")
def test_what_only_the_other_role_may_do(prompt, decoder):
    pm, dm = prompt.kv_cache_manager, decoder.kv_cache_manager
    for call in (
        lambda: dm.allocate_cache(byte_desc(), [CacheKey(1, 5)]),
        lambda: dm.allocate_cache(byte_desc(), (PLACEHOLDER,)),
        lambda: dm.remove_cache_key(CacheKey(1, 5)),
        lambda: pm.pull_cache(CacheKey(1, 5), pm.allocate_cache(byte_desc(1, 1))),
    ):
        with fails_with(INVALID):
            call()
    assert num_free_bytes(dm) == POOL


@row("E31")
def test_trailing_slots_may_have_no_key(pair):
    desc = byte_desc(3)
    bound(pair, desc, [CacheKey(1, 5), CacheKey(1, 6)], seed=1)
    assert_pullable(pair, CacheKey(1, 6), desc, 1, seed=1)
    assert_pullable(pair, CacheKey(1, 5), desc, 0, seed=1)


@row("E31")
def test_more_keys_than_slots(prompt):
    pm = prompt.kv_cache_manager
    with fails_with(INVALID):
        pm.allocate_cache(byte_desc(2), [CacheKey(1, 5), CacheKey(1, 6), PLACEHOLDER])
    assert num_free_bytes(pm) == POOL
    pm.allocate_cache(byte_desc(2), (CacheKey(1, 5), CacheKey(1, 6)))


@row("E32")
def test_a_placeholder_leaves_later_keys_at_their_slot(pair):
    desc = byte_desc(4)
    bound(pair, desc, [CacheKey(1, 5), PLACEHOLDER, CacheKey(1, 6), PLACEHOLDER], seed=2)
    assert_pullable(pair, CacheKey(1, 6), desc, 2, seed=2)


@row("E33")
def test_of_the_same_key_twice_the_last_slot_wins(pair):
    desc = byte_desc(3)
    bound_only(pair, desc, [CacheKey(1, 5), CacheKey(1, 6), CacheKey(1, 5)], seed=3)
    assert_pullable(pair, CacheKey(1, 6), desc, 1, seed=3)
    assert_pullable(pair, CacheKey(1, 5), desc, 2, seed=3)
    assert_gone(pair, CacheKey(1, 5))
    assert free_on_prompt(pair) == POOL  # it held one reference


@row("E34")
@pytest.mark.parametrize("key", [CacheKey(1, 5), prefix_key(5)], ids=["request", "prefix"])
def test_a_live_key_again(pair, key):
    desc = byte_desc(2)
    bound_only(pair, desc, [PLACEHOLDER, key], seed=4)
    free = free_on_prompt(pair)
    with fails_with(REPEAT):
        pair.pm.allocate_cache(desc, [CacheKey(1, 8), key])
    with fails_with(REPEAT):  # the cluster id is no part of its identity
        pair.pm.allocate_cache(desc, [CacheKey(9, key.req_id, prefix_id=key.prefix_id)])
    assert free_on_prompt(pair) == free
    assert_gone(pair, CacheKey(1, 8))
    assert_pullable(pair, key, desc, 1, seed=4)
    pair.pm.remove_cache_key(key)
    bound(pair, desc, [key], seed=5)
    assert_pullable(pair, key, desc, 0, seed=5)


@row("E35")
@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HOST])
def test_the_pool_has_a_limit(decoder, placement):
    dm = decoder.kv_cache_manager
    desc = CacheDesc(2, [4, POOL // 16], DataType.DT_UINT8, placement)  # half of the pool
    first, second = dm.allocate_cache(desc), dm.allocate_blocks_cache(desc)
    for allocate in (dm.allocate_cache, dm.allocate_blocks_cache):
        with fails_with(OUT_OF_MEMORY):
            allocate(desc)
    assert not fits(dm, 1)
    dm.deallocate_cache(second)
    assert num_free_bytes(dm) == POOL // 2
    third = dm.allocate_cache(desc)
    assert not read_cache(dm, third).any()
    for cache in (first, third):
        dm.deallocate_cache(cache)
    assert num_free_bytes(dm) == POOL


@row("E35")
def test_a_failed_allocation_binds_nothing(pair):
    with fails_with(OUT_OF_MEMORY):
        pair.pm.allocate_cache(byte_desc(1, POOL), [CacheKey(1, 5)])
    assert_gone(pair, CacheKey(1, 5))
    bound(pair, byte_desc(1), [CacheKey(1, 5)], seed=1)
    assert_pullable(pair, CacheKey(1, 5), byte_desc(1), 0, seed=1)


@row("E36", "KvCacheManager")
def test_deallocate_first_and_pull_later(pair):
    desc = byte_desc(2, 64)
    keys = [CacheKey(1, 5), CacheKey(1, 6)]
    bound_only(pair, desc, keys, seed=6)
    other = bound(pair, desc, [], seed=7)
    for slot in (1, 0):
        assert_pullable(pair, keys[slot], desc, slot, seed=6)
    np.testing.assert_array_equal(pair.call(read_cache, pair.pm, other), pattern(desc, 7))


@row("E37")
def test_the_last_key_that_is_pulled_frees_a_deallocated_cache(pair):
    desc = byte_desc(2)
    bound_only(pair, desc, [CacheKey(1, 5), CacheKey(1, 6)], seed=7)
    used = POOL - desc.num_tensors * desc.tensor_bytes
    assert free_on_prompt(pair) == used
    assert_pullable(pair, CacheKey(1, 5), desc, 0, seed=7)
    assert free_on_prompt(pair) == used
    assert_pullable(pair, CacheKey(1, 6), desc, 1, seed=7)
    assert free_on_prompt(pair) == POOL


@row("E37")
def test_the_last_key_that_is_removed_frees_a_deallocated_cache(prompt):
    pm = prompt.kv_cache_manager
    desc = byte_desc(3)
    keys = [CacheKey(1, 5), prefix_key(5), CacheKey(1, 5, model_id=3)]
    pm.deallocate_cache(pm.allocate_cache(desc, keys))
    for key in keys:
        assert num_free_bytes(pm) == POOL - desc.num_tensors * desc.tensor_bytes
        pm.remove_cache_key(key)
    assert num_free_bytes(pm) == POOL


@row("E37")
def test_a_handle_holds_a_cache_without_keys(pair):
    desc = byte_desc(1)
    cache = bound(pair, desc, [CacheKey(1, 5)], seed=8)
    assert_pullable(pair, CacheKey(1, 5), desc, 0, seed=8)
    assert free_on_prompt(pair) == POOL - desc.num_tensors * desc.tensor_bytes
    np.testing.assert_array_equal(pair.call(read_cache, pair.pm, cache), pattern(desc, 8))
    pair.pm.deallocate_cache(cache)
    assert free_on_prompt(pair) == POOL


@row("dropping the last reference to a KvCache deallocates it")
def test_a_handle_that_nobody_has_any_more(prompt):
    pm = prompt.kv_cache_manager
    desc, key = byte_desc(1), CacheKey(1, 5)
    view = pm.get_cache_tensors(pm.allocate_cache(desc))[0].torch()
    pm.allocate_blocks_cache(desc)
    pm.allocate_cache(desc, [key])
    gc.collect()
    assert num_free_bytes(pm) == POOL - desc.num_tensors * desc.tensor_bytes  # the key holds one
    view.fill_(7)
    assert view.sum() == 7 * desc.slot_bytes
    pm.remove_cache_key(key)
    assert num_free_bytes(pm) == POOL


@row("E38")
def test_deallocate_twice(prompt):
    pm = prompt.kv_cache_manager
    cache = pm.allocate_cache(byte_desc(1), [CacheKey(1, 5)])
    for _ in range(3):
        pm.deallocate_cache(cache)
    assert num_free_bytes(pm) < POOL  # the key's reference is still there
    pm.remove_cache_key(CacheKey(1, 5))
    pm.deallocate_cache(cache)
    pm.deallocate_cache(KvCache(77, byte_desc(1), [[0, 0, 0, 0]]))  # made by hand
    assert num_free_bytes(pm) == POOL


@row("E39", "KvCache")
def test_a_released_handle(decoder):
    dm = decoder.kv_cache_manager
    live, released = dm.allocate_cache(byte_desc()), dm.allocate_cache(byte_desc())
    blocks = dm.allocate_blocks_cache(byte_desc())
    dm.deallocate_cache(released)
    dm.deallocate_cache(blocks)
    assert (released.cache_id, released.cache_desc.batch_size) == (2, 2)
    by_hand = KvCache(9, byte_desc(), [[0, 0, 0, 0]])
    for call in (
        lambda: released.per_device_tensor_addrs,
        lambda: blocks.per_device_tensor_addrs,
        lambda: dm.copy_cache(live, released),
        lambda: dm.copy_cache(released, live),
        lambda: dm.copy_cache(live, by_hand),
        lambda: dm.get_cache_tensors(released),
        lambda: dm.get_cache_tensors(by_hand),
        lambda: dm.copy_blocks(blocks, {0: [1]}),
        lambda: dm.pull_cache(CacheKey(1, 1), released),
    ):
        with fails_with(NOT_EXIST):
            call()


@row("E41")
def test_remove_a_key_that_is_not_there(prompt):
    pm = prompt.kv_cache_manager
    cache = pm.allocate_cache(byte_desc(1), [CacheKey(1, 5)])
    for key in (CacheKey(1, 6), CacheKey(1, 5, model_id=1), prefix_key(5), PLACEHOLDER):
        pm.remove_cache_key(key)
    pm.deallocate_cache(cache)
    assert num_free_bytes(pm) < POOL
    pm.remove_cache_key(CacheKey(1, 5))
    pm.remove_cache_key(CacheKey(1, 5))
    assert num_free_bytes(pm) == POOL


@row("E53")
def test_copy_cache_writes_its_first_argument(decoder):
    dm = decoder.kv_cache_manager
    desc = byte_desc(3, 32)
    first, second = (write_new_cache(dm, desc, seed=seed) for seed in (1, 2))
    dm.copy_cache(first, second, 2, 0)
    dm.copy_cache(first, second, dst_batch_index=0, src_batch_index=1, offset=8, size=4, req_id=5)
    dm.copy_cache(first, second, dst_batch_index=1, src_batch_index=1, offset=30)
    expected, source = pattern(desc, 1), pattern(desc, 2)
    expected[:, 2] = source[:, 0]
    expected[:, 0, 8:12] = source[:, 1, 8:12]
    expected[:, 1, 30:] = source[:, 1, 30:]
    np.testing.assert_array_equal(read_cache(dm, first), expected)
    np.testing.assert_array_equal(read_cache(dm, second), source)
    dm.copy_cache(first, first, 2, 2)
    dm.copy_cache(first, first, 1, 0)
    expected[:, 1] = expected[:, 0]
    np.testing.assert_array_equal(read_cache(dm, first), expected)


@row("E53")
def test_copy_cache_checks_before_it_writes(decoder):
    dm = decoder.kv_cache_manager
    desc, small = byte_desc(2, 32), byte_desc(2, 16)
    target, source, short = (
        write_new_cache(dm, *one, seed=seed) for seed, one in ((1, [desc]), (2, [desc]), (3, [small]))
    )
    others = [CacheDesc(3, [2, 32], DataType.DT_UINT8), CacheDesc(4, [2, 32], DataType.DT_INT8)]
    for dst, src, options in (
        (target, source, {"dst_batch_index": 2}),
        (target, source, {"src_batch_index": 2}),
        (target, source, {"size": 33}),
        (target, source, {"offset": 32}),
        (target, source, {"offset": 30, "size": 3}),
        (target, source, {"offset": 2**62, "size": 2**62}),
        (target, short, {}),
        (target, short, {"size": 17}),
        (short, source, {"size": 17}),
        (target, dm.allocate_cache(others[0]), {}),
        (target, dm.allocate_cache(others[1]), {}),
    ):
        with fails_with(INVALID):
            dm.copy_cache(dst, src, **options)
    np.testing.assert_array_equal(read_cache(dm, target), pattern(desc, 1))
    dm.copy_cache(short, source)  # as much as the destination holds
    np.testing.assert_array_equal(read_cache(dm, short)[:, 0], pattern(desc, 2)[:, 0, :16])
    dm.copy_cache(target, short, 1, 1, size=16)
    np.testing.assert_array_equal(read_cache(dm, target)[:, 1, :16], pattern(small, 3)[:, 1])


@row("E53", "Placement")
def test_copies_between_the_host_and_the_device(pair):
    desc = byte_desc()
    on_host = CacheDesc(desc.num_tensors, desc.shape, desc.data_type, Placement.HOST)
    device, host, back = (pair.dm.allocate_cache(one) for one in (desc, on_host, desc))
    write_cache(pair.dm, device, 1)
    for slot in range(2):
        pair.dm.copy_cache(host, device, slot, slot)
        pair.dm.copy_cache(back, host, 1 - slot, slot)
    np.testing.assert_array_equal(read_cache(pair.dm, host), pattern(desc, 1))
    np.testing.assert_array_equal(read_cache(pair.dm, back), pattern(desc, 1)[:, ::-1])
    bound(pair, on_host, [CacheKey(1, 5)], seed=9)
    pair.dm.pull_cache(CacheKey(1, 5), host)
    assert_slot(pair, host, 0, pattern(desc, 9)[:, 0])


@row("E54", "Tensor")
def test_the_tensors_of_a_cache(decoder):
    dm = decoder.kv_cache_manager
    cache = dm.allocate_cache(CacheDesc(3, [2, 5, 4], DataType.DT_FLOAT))
    (addresses,) = cache.per_device_tensor_addrs
    for index in range(3):
        (tensor,) = dm.get_cache_tensors(cache, index)
        view = tensor.torch()
        assert view.shape == (2, 5, 4)
        assert tensor.tensor_desc.shape == [2, 5, 4]
        assert view.data_ptr() == addresses[index]
        view[1, 4, 3] = index + 1
        tensor.numpy()[0, 0, 0] = -1
        assert dm.get_cache_tensors(cache, index)[0].numpy()[1, 4, 3] == index + 1
        assert view[0, 0, 0] == -1
    for call in (dm.get_cache_tensors, lambda cache, index: dm.get_cache_tensors(cache, tensor_index=index)):
        with fails_with(INVALID):
            call(cache, 3)
    assert torch.count_nonzero(dm.get_cache_tensors(cache)[0].torch()) == 2


@row("E55")
def test_a_cache_of_another_object_with_the_same_id(pair):
    other = sides.start_decoder(9)
    try:
        manager = other.kv_cache_manager
        foreign, blocks = manager.allocate_cache(byte_desc()), manager.allocate_blocks_cache(byte_desc())
        own = pair.dm.allocate_cache(byte_desc())
        assert foreign.cache_id == own.cache_id
        bound(pair, byte_desc(), [CacheKey(1, 5)], seed=1)
        for call in (
            lambda: pair.dm.deallocate_cache(foreign),
            lambda: pair.dm.copy_cache(own, foreign),
            lambda: pair.dm.copy_cache(foreign, own),
            lambda: pair.dm.get_cache_tensors(foreign),
            lambda: pair.dm.pull_cache(CacheKey(1, 5), foreign),
            lambda: pair.dm.copy_blocks(blocks, {0: [1]}),
        ):
            with fails_with(INVALID):
                call()
        write_cache(manager, foreign, 3)
        np.testing.assert_array_equal(read_cache(manager, foreign), pattern(byte_desc(), 3))
        assert_pullable(pair, CacheKey(1, 5), byte_desc(), 0, seed=1)
    finally:
        other.finalize()
