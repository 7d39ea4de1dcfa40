"""Transfers that go on beside the computation, layer by layer."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from conformance import row
from failing import fails_with
from pair_checks import bound_blocks
from pairs import CROSSED_PAIRS, PairMaker
from sides import Layers, byte_desc, owned_bytes, pattern, read_cache, register_new, write_new_cache

from quire.datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)


@pytest.fixture(params=CROSSED_PAIRS)
def make_pair(request, prompt_process):
    with contextlib.ExitStack() as stack:
        yield PairMaker(request.param, prompt_process, stack)


CODES = LLMStatusCode
SUCCESS = LLMStatusCode.LLM_SUCCESS
TO = BlocksCacheKey(2)
DESC = byte_desc(4, 16, 6)  # three layers


def asked(synchronizer) -> list[int]:
    return [layer for layer, _ in synchronizer.asked]


@row("transfer_cache_async", "TransferWithCacheKeyConfig", "CacheTask")
def test_layers_of_blocks_go_where_keys_say(pair):
    first, second = (register_new(pair.dm, DESC, BlocksCacheKey(2, n), seed=2) for n in range(2))
    source = bound_blocks(pair, DESC, BlocksCacheKey(1), seed=1)
    layers = pair.call(Layers)
    configs = [
        TransferWithCacheKeyConfig(TO),
        TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, second.cache_id), range(1, 3), range(2)),
    ]
    task = pair.pm.transfer_cache_async(source, layers, configs, [3, 1], [0, 2])
    assert (task.synchronize(), task.get_results()) == (SUCCESS, [SUCCESS, SUCCESS])
    assert layers.asked == [(layer, 60_000) for layer in range(3)]
    expected = pattern(DESC, 2)
    expected[:, [0, 2]] = pattern(DESC, 1)[:, [3, 1]]
    np.testing.assert_array_equal(owned_bytes(first), expected)
    expected = pattern(DESC, 2)
    expected[:4, [0, 2]] = pattern(DESC, 1)[2:, [3, 1]]
    np.testing.assert_array_equal(owned_bytes(second), expected)


@row("transfer_cache_async", "TransferConfig")
def test_addresses_reach_allocated_caches_too(pair):
    blocks, slots = pair.dm.allocate_blocks_cache(DESC), pair.dm.allocate_cache(DESC)
    source = bound_blocks(pair, DESC, BlocksCacheKey(1), seed=1)
    config = TransferConfig(2, blocks.tensor_addrs)
    task = pair.pm.transfer_cache_async(source, pair.call(Layers), [config], [3, 1], [0, 2])
    assert task.synchronize(60_000) is SUCCESS
    expected = np.zeros_like(pattern(DESC, 1))
    expected[:, [0, 2]] = pattern(DESC, 1)[:, [3, 1]]
    np.testing.assert_array_equal(read_cache(pair.dm, blocks), expected)
    source = pair.call(write_new_cache, pair.pm, DESC, seed=4)
    config = TransferConfig(2, slots.tensor_addrs, src_batch_index=2)
    assert pair.pm.transfer_cache_async(source, pair.call(Layers), [config]).get_results() == [SUCCESS]
    np.testing.assert_array_equal(read_cache(pair.dm, slots)[:, 0], pattern(DESC, 4)[:, 2])
    with fails_with(LLMStatusCode.LLM_PARAM_INVALID):
        pair.pm.push_cache(CacheKeyByIdAndIndex(2, slots.cache_id), source)


@row("transfer_cache_async", "TransferConfig")
def test_layers_go_where_addresses_say(pair):
    blocks = register_new(pair.dm, DESC, TO, seed=2)
    slots = register_new(pair.dm, DESC, seed=3, is_blocks=False)
    source = bound_blocks(pair, DESC, BlocksCacheKey(1), seed=1)
    config = TransferConfig(2, blocks.tensor_addrs[2:], range(1, 3))
    task = pair.pm.transfer_cache_async(source, pair.call(Layers), [config], [3, 1], [0, 2], 16)
    assert task.synchronize(60_000) is SUCCESS
    expected = pattern(DESC, 2)
    expected[2:, [0, 2]] = pattern(DESC, 1)[2:, [3, 1]]
    np.testing.assert_array_equal(owned_bytes(blocks), expected)
    source = pair.call(write_new_cache, pair.pm, byte_desc(2, 9, 6), seed=4)
    at = [one + 2 * 16 + 5 for one in slots.tensor_addrs]
    configs = [
        TransferConfig(2, at, src_batch_index=1),
        TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, slots.cache_id, 3), src_batch_index=1),
    ]
    task = pair.pm.transfer_cache_async(source, pair.call(Layers), configs)
    assert task.get_results() == [SUCCESS, SUCCESS]
    expected = pattern(DESC, 3)
    expected[:, 2, 5:14] = expected[:, 3, :9] = pattern(byte_desc(2, 9, 6), 4)[:, 1]
    np.testing.assert_array_equal(owned_bytes(slots), expected)


@row("transfer_cache_async")
def test_an_odd_number_of_tensors_are_as_many_layers(pair):
    desc = byte_desc(3, 16, 3)
    target = register_new(pair.dm, desc, TO, seed=2)
    source = bound_blocks(pair, desc, BlocksCacheKey(1), seed=1)
    layers = pair.call(Layers)
    task = pair.pm.transfer_cache_async(source, layers, (TransferWithCacheKeyConfig(TO),), [0], [1])
    assert task.synchronize() is SUCCESS
    assert asked(layers) == [0, 1, 2]
    np.testing.assert_array_equal(owned_bytes(target)[:, 1], pattern(desc, 1)[:, 0])


class Gate(LayerSynchronizer):
    """Lets layers go one by one."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.released = threading.Semaphore(0)

    def synchronize_layer(self, layer_index, timeout_in_millis):
        self.reached.release()
        return self.released.acquire(timeout=20)


@pytest.fixture
def local(make_pair):
    """A pair in one process, which a test's own synchronizer needs."""
    pair = make_pair()
    if pair.process is not None:
        pytest.skip("the synchronizer is in this process")
    target = register_new(pair.dm, DESC, TO, seed=2)
    return pair, bound_blocks(pair, DESC, BlocksCacheKey(1), seed=1), target


@row("transfer_cache_async", "LayerSynchronizer", "CacheTask")
def test_a_layer_is_not_moved_before_it_is_computed(local):
    pair, source, target = local
    gate, expected = Gate(), pattern(DESC, 2)
    configs = [TransferWithCacheKeyConfig(TO), TransferWithCacheKeyConfig(BlocksCacheKey(2, 5), range(2, 3))]
    task = pair.pm.transfer_cache_async(source, gate, configs, [3], [0])
    for layer in range(3):
        gate.reached.acquire()
        np.testing.assert_array_equal(owned_bytes(target), expected)
        assert task.get_results(1) == [None if layer == 0 else CODES.LLM_TIMEOUT, None]
        assert task.synchronize(1) is CODES.LLM_TIMEOUT
        gate.released.release()
        expected[2 * layer : 2 * layer + 2, 0] = pattern(DESC, 1)[2 * layer : 2 * layer + 2, 3]
    assert task.get_results() == [SUCCESS, CODES.LLM_KV_CACHE_NOT_EXIST]
    assert task.synchronize(1) is CODES.LLM_KV_CACHE_NOT_EXIST
    np.testing.assert_array_equal(owned_bytes(target), expected)


def raising(error):
    def act():
        raise error

    return act


@row("LayerSynchronizer")
@pytest.mark.parametrize(
    ("act", "code"),
    [
        (lambda: False, CODES.LLM_TIMEOUT),
        (lambda: None, CODES.LLM_TIMEOUT),
        (lambda: np.zeros(2), CODES.LLM_FAILED),
        (raising(ValueError("lost")), CODES.LLM_FAILED),
        (raising(SystemExit()), CODES.LLM_FAILED),
        (raising(KeyboardInterrupt()), CODES.LLM_FAILED),
    ],
)
def test_a_synchronizer_that_fails_ends_the_task(local, act, code):
    pair, source, target = local
    layers = Layers(1, act)
    configs = [TransferWithCacheKeyConfig(TO), TransferWithCacheKeyConfig(TO, range(1), range(1))]
    task = pair.pm.transfer_cache_async(source, layers, configs, [3], [0])
    assert task.get_results() == [code, SUCCESS]
    assert task.synchronize() is code
    assert asked(layers) == [0, 1]
    expected = pattern(DESC, 2)
    expected[:2, 0] = pattern(DESC, 1)[:2, 3]
    np.testing.assert_array_equal(owned_bytes(target), expected)
    pair.pm.push_blocks(TO, source, [0], [0])  # nothing is held


@row("CacheTask")
def test_each_configuration_has_its_own_end(local):
    pair, source, target = local
    allocated = pair.dm.allocate_blocks_cache(DESC)
    configs = [
        TransferWithCacheKeyConfig(BlocksCacheKey(9)),
        TransferWithCacheKeyConfig(BlocksCacheKey(2, 7)),
        TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, allocated.cache_id)),
        TransferWithCacheKeyConfig(TO, range(1), range(5, 6)),
        TransferConfig(2, [1 << 20] * 6),
        TransferConfig(2, target.tensor_addrs[::-1]),
        TransferConfig(2, [one + 1 for one in target.tensor_addrs]),
        TransferWithCacheKeyConfig(TO),
    ]
    task = pair.pm.transfer_cache_async(source, Layers(), configs, [3], [0])
    assert task.get_results() == [
        CODES.LLM_NOT_YET_LINK,
        CODES.LLM_KV_CACHE_NOT_EXIST,
        CODES.LLM_PARAM_INVALID,
        CODES.LLM_PARAM_INVALID,
        CODES.LLM_KV_CACHE_NOT_EXIST,
        CODES.LLM_KV_CACHE_NOT_EXIST,
        CODES.LLM_PARAM_INVALID,
        SUCCESS,
    ]
    assert task.synchronize() is CODES.LLM_NOT_YET_LINK
    for wrong, error in (("1", TypeError), (True, TypeError), (0, ValueError), (2**31, ValueError)):
        for call in (task.synchronize, task.get_results):
            with pytest.raises(error):
                call(wrong)


@row("CacheTask")
@pytest.mark.parametrize("is_finalized", [True, False])
def test_a_source_that_goes_ends_the_task(local, is_finalized):
    pair, source, _ = local
    gate = Gate()
    task = pair.pm.transfer_cache_async(source, gate, [TransferWithCacheKeyConfig(TO)], [3], [0])
    gate.reached.acquire()
    if is_finalized:
        pair.prompt.finalize()
    else:
        pair.pm.deallocate_cache(source)
    gate.released.release()
    code = CODES.LLM_ENGINE_FINALIZED if is_finalized else CODES.LLM_KV_CACHE_NOT_EXIST
    assert task.get_results() == [code]


@row("transfer_cache_async")
def test_what_cannot_be_a_transfer_is_refused_at_once(local):
    pair, blocks, _ = local
    slots, by_key = pair.pm.allocate_cache(DESC), TransferWithCacheKeyConfig(TO)
    to_slot = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1))
    for cache, config, *indices in (
        (blocks, by_key),
        (slots, by_key, [0], [0]),
        (slots, by_key),
        (slots, TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1), src_batch_index=4)),
        (blocks, by_key, [0, 1], [0]),
        (blocks, by_key, [0, 1], [0, 0]),
        (blocks, by_key, [4], [0]),
        (blocks, by_key, [0], [0], 17),
        (blocks, TransferWithCacheKeyConfig(TO, range(4)), [0], [0]),
        (blocks, TransferWithCacheKeyConfig(TO, range(0, 3, 2)), [0], [0]),
        (blocks, TransferWithCacheKeyConfig(TO, range(2), range(1)), [0], [0]),
        (blocks, TransferConfig(2, [5]), [0], [0]),
        (blocks, TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1, 1)), [0], [0]),
    ):
        with fails_with(CODES.LLM_PARAM_INVALID):
            pair.pm.transfer_cache_async(cache, Layers(), [config], *indices)
    with fails_with(CODES.LLM_PARAM_INVALID):
        pair.dm.transfer_cache_async(pair.dm.allocate_cache(DESC), Layers(), [to_slot])
    for arguments in (
        (None, Layers(), [to_slot]),
        (slots, None, [to_slot]),
        (slots, Layers(), None),
        (slots, Layers(), [CacheKey(2, 1)]),
        (blocks, Layers(), [by_key], [0]),
        (blocks, Layers(), [by_key], None, [0]),
        (blocks, Layers(), [by_key], [0], [0], "16"),
    ):
        with pytest.raises(TypeError):
            pair.pm.transfer_cache_async(*arguments)
    with pytest.raises(ValueError, match="empty"):
        pair.pm.transfer_cache_async(slots, Layers(), [])


@row("TransferConfig", "TransferWithCacheKeyConfig", "LayerSynchronizer")
def test_configurations_are_checked():
    for make in (
        lambda: TransferConfig(None, [1]),
        lambda: TransferConfig(1, None),
        lambda: TransferConfig(1, [None]),
        lambda: TransferConfig(1, [1], [0]),
        lambda: TransferWithCacheKeyConfig(CacheKey(1, 1)),
        lambda: TransferWithCacheKeyConfig(TO, 1),
        lambda: TransferWithCacheKeyConfig(TO, None, None, None),
        LayerSynchronizer,
    ):
        with pytest.raises(TypeError):
            make()
    for make in (lambda: TransferConfig(-1, [1]), lambda: TransferConfig(1, [0])):
        with pytest.raises(ValueError, match=r"\w"):
            make()
