"""Caches in memory that belongs to somebody else."""

from __future__ import annotations

import gc
import mmap
import threading

import numpy as np
import pytest
import torch
from conformance import row
from failing import fails_with
from pair_checks import free_on_prompt
from sides import (
    PATIENT,
    POOL,
    byte_desc,
    num_free_bytes,
    owned_bytes,
    pattern,
    pool_of,
    read_cache,
    register_new,
    set_timeout,
)

from quire.datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMException,
    LLMStatusCode,
    Placement,
)
from quire.datadist.caches.memory import HostMemory
from quire.datadist.caches.registered_memory import memory_at, memory_of_tensors

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
KEY = BlocksCacheKey(1)
CPU = torch.device("cpu")


@row("register_blocks_cache", "Cache")
def test_blocks_are_pulled_from_memory_of_the_one_into_memory_of_the_other(pair):
    desc = byte_desc(5)
    source = pair.call(register_new, pair.pm, desc, KEY, seed=1)
    target = register_new(pair.dm, desc, seed=2)
    assert free_on_prompt(pair) == num_free_bytes(pair.dm) == POOL
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 2))
    pair.dm.pull_blocks(KEY, target, [4, 0], [1, 3])
    expected = pattern(desc, 2)
    expected[:, [1, 3]] = pattern(desc, 1)[:, [4, 0]]
    np.testing.assert_array_equal(owned_bytes(target), expected)
    np.testing.assert_array_equal(pair.call(owned_bytes, source), pattern(desc, 1))
    assert Cache is KvCache
    assert target.tensor_addrs == target.per_device_tensor_addrs[0]
    assert [pair.dm.get_cache_tensors(target, one)[0].torch().data_ptr() for one in range(4)] == (
        target.tensor_addrs
    )
    with fails_with(LLMStatusCode.LLM_REPEAT_REQUEST):
        pair.call(register_new, pair.pm, desc, KEY, seed=1)
    pair.pm.unregister_cache(source.cache_id)
    with fails_with(NOT_EXIST):
        pair.dm.pull_blocks(KEY, target, [0], [0])
    np.testing.assert_array_equal(owned_bytes(target), expected)


@row("register_cache")
def test_slots_are_pulled_by_id_from_registered_memory(pair):
    desc = byte_desc(3)
    source = pair.call(register_new, pair.pm, desc, seed=1, is_blocks=False)
    target = register_new(pair.dm, desc, seed=2, is_blocks=False)
    pair.dm.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id, 2), target, 1)
    np.testing.assert_array_equal(owned_bytes(target)[:, 1], pattern(desc, 1)[:, 2])
    with fails_with(INVALID):
        pair.dm.pull_blocks(KEY, target, [0], [0])
    pair.pm.unregister_cache(source.cache_id)
    with fails_with(NOT_EXIST):
        pair.dm.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id, 2), target, 0)


@row("register_blocks_cache", "register_cache")
@pytest.mark.parametrize("role", ["prompt", "decoder"])
def test_every_role_registers_and_copies(role, request):
    manager = request.getfixturevalue(role).kv_cache_manager
    desc = byte_desc(3)
    blocks = register_new(manager, desc, KEY, seed=1)
    manager.copy_blocks(blocks, {0: [2]})
    np.testing.assert_array_equal(owned_bytes(blocks), pattern(desc, 1)[:, [0, 1, 0]])
    slots = register_new(manager, desc, seed=2, is_blocks=False)
    allocated = manager.allocate_cache(desc)
    manager.copy_cache(slots, allocated, dst_batch_index=1)
    assert not owned_bytes(slots)[:, 1].any()
    assert (blocks.cache_id, slots.cache_id, allocated.cache_id) == (1, 2, 3)
    host = register_new(manager, CacheDesc(1, [2, 8], DataType.DT_UINT8, Placement.HOST), seed=3)
    assert owned_bytes(host).any()


@row("unregister_cache")
def test_what_is_registered_is_unregistered_and_what_is_allocated_deallocated(decoder):
    dm = decoder.kv_cache_manager
    desc = byte_desc(2)
    registered, allocated = register_new(dm, desc, KEY, seed=1), dm.allocate_cache(desc)
    with fails_with(INVALID):
        dm.deallocate_cache(registered)
    with fails_with(INVALID):
        dm.unregister_cache(allocated.cache_id)
    dm.unregister_cache(registered.cache_id)
    dm.unregister_cache(registered.cache_id)
    dm.unregister_cache(99)
    with fails_with(NOT_EXIST):
        registered.tensor_addrs  # noqa: B018
    with fails_with(NOT_EXIST):
        dm.get_cache_tensors(registered)
    register_new(dm, desc, KEY, seed=1)  # its key is free, and this one is dropped at once
    gc.collect()
    register_new(dm, desc, KEY, seed=1)
    with pytest.raises(TypeError):
        dm.unregister_cache(registered)
    decoder.finalize()
    with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
        dm.unregister_cache(1)
    with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
        register_new(dm, desc, seed=1)


@row("unregister_cache")
def test_unregistering_waits_for_a_transfer_that_reads_the_memory(decoder):
    dm = decoder.kv_cache_manager
    cache = register_new(dm, byte_desc(2), KEY, seed=1)
    hold = pool_of(decoder).hold_blocks(0)
    set_timeout(dm, 10)
    for _ in range(2):
        with fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
            dm.unregister_cache(cache.cache_id)
    set_timeout(dm, PATIENT)
    waiting = threading.Thread(target=dm.unregister_cache, args=(cache.cache_id,))
    waiting.start()
    hold.end(consume=False)
    waiting.join()
    assert not pool_of(decoder).num_caches


class Library:
    def __init__(self, error=None):
        self.error, self.forgotten = error, []

    def forget(self, memory, _deadline):
        self.forgotten.append(memory)
        if self.error:
            raise self.error


@row("unregister_cache")
def test_every_library_forgets_the_memory_first(decoder):
    dm, pool = decoder.kv_cache_manager, pool_of(decoder)
    cache = register_new(dm, byte_desc(2), seed=1)
    memory, library, ended = pool.cache(cache.cache_id).memory, Library(), Library()
    for one in (library, ended):
        memory.add_user(one.forget)
    del ended
    dm.unregister_cache(cache.cache_id)
    assert library.forgotten == [memory]


@row("unregister_cache")
@pytest.mark.parametrize("is_lost", [True, False])
def test_memory_that_a_transport_keeps_is_not_given_back(decoder, is_lost):
    dm, pool = decoder.kv_cache_manager, pool_of(decoder)
    cache = register_new(dm, byte_desc(2), seed=1)
    memory, library = pool.cache(cache.cache_id).memory, Library(None if is_lost else OSError("hangs"))
    memory.add_user(library.forget)
    memory.is_lost = is_lost
    with fails_with(LLMStatusCode.LLM_FAILED):
        dm.unregister_cache(cache.cache_id)


def address_of(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


@row("register_blocks_cache")
def test_memory_that_is_not_there_or_overlaps_is_not_registered(decoder):
    dm = decoder.kv_cache_manager
    memory, read_only = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    first, nowhere = address_of(memory), 1 << 50
    desc = CacheDesc(2, [4, 16], DataType.DT_UINT8)
    for addresses in (
        [first],
        [first, first + 64, first + 128],
        [first, first + 63],
        [first, first],
        [first, nowhere],
        [nowhere, first],
        [first, address_of(read_only)],
    ):
        for call in (dm.register_cache, dm.register_blocks_cache):
            with fails_with(INVALID):
                call(desc, addresses)
    assert pool_of(decoder).num_caches == 0
    dm.register_cache(desc, [first + 64, first])


@row("register_cache")
def test_addresses_are_checked(decoder):
    dm = decoder.kv_cache_manager
    array = np.zeros(64, np.uint8)
    desc = CacheDesc(1, [2, 8], DataType.DT_FLOAT)
    for call in (dm.register_cache, dm.register_blocks_cache):
        for addresses, error in (
            ([0], ValueError),
            ([2**64], ValueError),
            ([True], TypeError),
            (array.ctypes.data, TypeError),
            ([None], TypeError),
        ):
            with pytest.raises(error):
                call(desc, addresses)
        for address in (array.ctypes.data + 1, 2**64 - 4):
            with fails_with(INVALID):
                call(desc, [address])
        with fails_with(INVALID):
            call(CacheDesc(1, [2, 8], DataType.DT_FLOAT, batch_dim_index=1), [array.ctypes.data])
        call(desc, [array.ctypes.data])


def test_memory_of_tensors_is_kept_and_not_copied():
    desc = CacheDesc(2, [3, 2], DataType.DT_BF16)
    tensors = [torch.ones(3, 2, dtype=torch.bfloat16) for _ in range(2)]
    memory = memory_of_tensors(desc, tensors)
    memory.tensors[1][2] = 7
    assert tensors[1][2].tolist() == [7, 7]
    assert memory.addresses() == [one.data_ptr() for one in tensors]
    for wrong in (tensors[:1], [tensors[0], tensors[1].T], [tensors[0], torch.ones(3, 3)]):
        with pytest.raises(LLMException):
            memory_of_tensors(desc, wrong)


def test_memory_at_an_address_may_lie_in_several_mappings():
    memory = mmap.mmap(-1, 1 << 14)
    base = address_of(memory)
    memory.madvise(mmap.MADV_DONTFORK, 4096, 4096)  # splits the mapping
    desc = CacheDesc(1, [4, 4096], DataType.DT_UINT8)
    made = memory_at(desc, [base], CPU)
    assert isinstance(made, HostMemory)
    made.tensors[0].fill_(5)
    assert memory[:] == bytes([5]) * (1 << 14)
