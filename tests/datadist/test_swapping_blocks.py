"""Blocks that are copied between caches of one side, and caches that are only there for that."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import row
from failing import fails_with
from sides import byte_desc, pattern, read_cache, register_new, write_new_blocks

from quire.datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMStatusCode,
    Placement,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture(params=["prompt", "decoder"])
def manager(request):
    return request.getfixturevalue(request.param).kv_cache_manager


def host_desc(num_blocks: int = 3) -> CacheDesc:
    return CacheDesc(4, [num_blocks, 64], DataType.DT_UINT8, Placement.HOST)


def addresses_of(arrays) -> list[int]:
    return [one.ctypes.data for one in arrays]


@row("swap_blocks")
@pytest.mark.parametrize(
    "pairs", [{4: 0, 1: 2}, [(4, 0), (1, 2)], ([4, 0], [1, 2])], ids=["dict", "list", "tuple"]
)
def test_blocks_go_to_the_host_and_back(manager, pairs):
    device, host = (
        write_new_blocks(manager, byte_desc(5), seed=1),
        write_new_blocks(manager, host_desc(), seed=2),
    )
    manager.swap_blocks(device, host, pairs)
    expected = pattern(host_desc(), 2)
    expected[:, [0, 2]] = pattern(byte_desc(5), 1)[:, [4, 1]]
    np.testing.assert_array_equal(read_cache(manager, host), expected)
    manager.swap_blocks(host, device, {2: 3, 0: 0})
    np.testing.assert_array_equal(read_cache(manager, device), pattern(byte_desc(5), 1)[:, [4, 1, 2, 1, 4]])
    manager.swap_blocks(host, device, {})


@row("create_cpu_cache")
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_cache_of_the_host_that_no_manager_has(manager, is_nested):
    own = pattern(host_desc(), 2)
    addresses = addresses_of(own)
    cache = Cache.create_cpu_cache(host_desc(), [addresses] if is_nested else addresses)
    assert (cache.tensor_addrs, cache.cache_desc.shape) == (addresses, [3, 64])
    device = register_new(manager, byte_desc(5), seed=1)
    manager.swap_blocks(device, cache, {4: 1})
    np.testing.assert_array_equal(own[:, 1], pattern(byte_desc(5), 1)[:, 4])
    own[:, 0] = 77
    manager.swap_blocks(cache, device, [(0, 2)])
    assert (read_cache(manager, device)[:, 2] == 77).all()
    with fails_with(NOT_EXIST):
        manager.get_cache_tensors(cache)
    manager.deallocate_cache(cache)  # like any other that no manager has


@row("create_cpu_cache")
def test_what_is_no_memory_of_the_host_is_refused():
    own = pattern(host_desc(), 2)
    for desc, addresses in (
        (byte_desc(3), addresses_of(own)),
        (CacheDesc(4, [3, 64], DataType.DT_UINT8, Placement.HOST, 1), addresses_of(own)),
        (host_desc(), addresses_of(own)[:3]),
        (host_desc(), [addresses_of(own)[:3]]),
        (host_desc(), [1 << 50, *addresses_of(own)[:3]]),
    ):
        with fails_with(INVALID):
            Cache.create_cpu_cache(desc, addresses)
    for addresses in (None, 5, ["1"], [[None]], [addresses_of(own), addresses_of(own)]):
        with pytest.raises(TypeError):
            Cache.create_cpu_cache(host_desc(), addresses)
    with pytest.raises(ValueError, match="addrs"):
        Cache.create_cpu_cache(host_desc(), [0, 1, 2, 3])


@row("swap_blocks")
def test_bad_swaps_write_nothing(manager):
    device, host = (
        write_new_blocks(manager, byte_desc(5), seed=1),
        write_new_blocks(manager, host_desc(), seed=2),
    )
    slots = manager.allocate_cache(byte_desc(3))
    others = [
        manager.allocate_blocks_cache(CacheDesc(4, [3, 32], DataType.DT_UINT8)),
        manager.allocate_blocks_cache(CacheDesc(2, [3, 64], DataType.DT_UINT8)),
        manager.allocate_blocks_cache(CacheDesc(4, [3, 64], DataType.DT_INT8)),
    ]
    for source, target, pairs in (
        (device, device, {0: 1}),
        (device, host, {0: 1, 2: 1}),
        (device, host, {5: 1}),
        (device, host, {0: 0, 1: 3}),
        (device, host, {2**63: 1}),
        (slots, host, {0: 1}),
        (device, slots, {0: 1}),
        *((device, other, {0: 1}) for other in others),
    ):
        with fails_with(INVALID):
            manager.swap_blocks(source, target, pairs)
    np.testing.assert_array_equal(read_cache(manager, host), pattern(host_desc(), 2))
    np.testing.assert_array_equal(read_cache(manager, device), pattern(byte_desc(5), 1))
    for pairs in (None, 5, [1], {0: None}, {True: 1}, {"0": 1}, [(0, 1.0)]):
        with pytest.raises(TypeError):
            manager.swap_blocks(device, host, pairs)
    for pairs in ([(0, 1, 2)], [()], {0: -1}, {2**64: 1}):
        with pytest.raises(ValueError, match="pairs"):
            manager.swap_blocks(device, host, pairs)
    manager.deallocate_cache(host)
    with fails_with(NOT_EXIST):
        manager.swap_blocks(device, host, {0: 0})


@row("deallocate_blocks_cache")
def test_a_blocks_cache_is_deallocated_as_such(pair):
    key = BlocksCacheKey(1)
    blocks = pair.pm.allocate_blocks_cache(byte_desc(), key)
    target = pair.dm.allocate_blocks_cache(byte_desc())
    pair.dm.pull_blocks(key, target, [0], [1])
    slots = pair.pm.allocate_cache(byte_desc())
    with fails_with(INVALID):
        pair.pm.deallocate_blocks_cache(slots)
    registered = register_new(pair.dm, byte_desc(), seed=1)
    with fails_with(INVALID):
        pair.dm.deallocate_blocks_cache(registered)
    pair.pm.deallocate_blocks_cache(blocks)
    pair.pm.deallocate_blocks_cache(blocks)
    with fails_with(NOT_EXIST):
        pair.dm.pull_blocks(key, target, [0], [1])
    pair.dm.deallocate_blocks_cache(target)
    with fails_with(NOT_EXIST):
        target.tensor_addrs  # noqa: B018
