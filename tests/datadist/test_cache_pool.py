from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMStatusCode
from quire.datadist.caches.cache_pool import CachePool

UNSET = 2**64 - 1
KEYS = [
    *(CacheKey(1, req_id, model_id) for req_id in range(3) for model_id in range(2)),
    *(CacheKey(1, 0, model_id, prefix_id) for prefix_id in range(2) for model_id in range(2)),
    CacheKey(1, UNSET),
]
CODES = LLMStatusCode


def desc(num_slots: int, slot_bytes: int = 4, num_tensors: int = 2) -> CacheDesc:
    return CacheDesc(num_tensors, [num_slots, slot_bytes], DataType.DT_INT8)


def code_of(call, *arguments, **options) -> LLMStatusCode:
    """Return what a call raises, or success."""
    try:
        call(*arguments, **options)
    except LLMException as error:
        return error.status_code
    return CODES.LLM_SUCCESS


def name_of(key: CacheKey):
    """What a key names, as the specification says it; None for a placeholder."""
    if key.prefix_id != UNSET:
        return ("prefix", key.prefix_id, key.model_id)
    return None if key.req_id == UNSET else ("request", key.req_id, key.model_id)


@dataclasses.dataclass
class NaiveCache:
    num_slots: int
    num_bytes: int
    is_blocks: bool
    has_handle: bool = True
    is_registered: bool = False


class PoolMachine(RuleBasedStateMachine):
    """The pool against lists of what holds what; nothing is counted in the model."""

    @initialize(limit=st.sampled_from([None, 0, 48, 100]))
    def build(self, limit):
        self.is_memory_scarce = False
        self.limit = limit
        self.pool = CachePool(self.memory, limit)
        self.next_id = 1
        self.caches: dict[int, NaiveCache] = {}
        self.keys: dict[tuple, tuple[int, int, object]] = {}  # name: cache, slot, this life of the key
        self.blocks_keys: dict[int, int] = {}
        self.holds: list[tuple[object, int, tuple | None, object]] = []

    def memory(self, _desc):
        if self.is_memory_scarce:
            raise LLMException(status_code=CODES.LLM_DEVICE_OUT_OF_MEMORY)
        return object()

    def held(self) -> set[int]:
        by_handle = {one for one, cache in self.caches.items() if cache.has_handle}
        return by_handle | {one for one, _, _ in self.keys.values()} | {one for _, one, _, _ in self.holds}

    def used_bytes(self) -> int:
        return sum(self.caches[one].num_bytes for one in self.held())

    def names(self, keys) -> dict[tuple, int]:
        return {name_of(key): slot for slot, key in enumerate(keys) if name_of(key) is not None}

    def refusal(self, num_bytes: int) -> LLMStatusCode:
        is_full = self.limit is not None and self.used_bytes() + num_bytes > self.limit
        return CODES.LLM_DEVICE_OUT_OF_MEMORY if is_full or self.is_memory_scarce else CODES.LLM_SUCCESS

    @rule(num_slots=st.integers(1, 4), keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def allocate(self, num_slots, keys):
        names = self.names(keys)
        expected = self.refusal(8 * num_slots)
        if any(name in self.keys for name in names):
            expected = CODES.LLM_REPEAT_REQUEST
        if len(keys) > num_slots:
            expected = CODES.LLM_PARAM_INVALID
        assert code_of(self.pool.allocate, desc(num_slots), keys) is expected
        if expected is CODES.LLM_SUCCESS:
            self.caches[self.next_id] = NaiveCache(num_slots, 8 * num_slots, is_blocks=False)
            self.keys.update({name: (self.next_id, slot, object()) for name, slot in names.items()})
            self.next_id += 1

    @rule(num_blocks=st.integers(1, 3), model_id=st.none() | st.integers(0, 1))
    def allocate_blocks(self, num_blocks, model_id):
        expected = self.refusal(8 * num_blocks)
        if model_id in self.blocks_keys:
            expected = CODES.LLM_REPEAT_REQUEST
        key = None if model_id is None else BlocksCacheKey(1, model_id)
        assert code_of(self.pool.allocate_blocks, desc(num_blocks), key) is expected
        if expected is CODES.LLM_SUCCESS:
            self.caches[self.next_id] = NaiveCache(num_blocks, 8 * num_blocks, is_blocks=True)
            if model_id is not None:
                self.blocks_keys[model_id] = self.next_id
            self.next_id += 1

    @rule(num_slots=st.integers(1, 3), is_blocks=st.booleans(), model_id=st.none() | st.integers(0, 1))
    def register(self, num_slots, is_blocks, model_id):
        key = None if model_id is None else BlocksCacheKey(1, model_id)
        if not is_blocks:
            code = code_of(self.pool.register, desc(num_slots), object())
        else:
            code = code_of(self.pool.register_blocks, desc(num_slots), object(), key)
        if is_blocks and model_id in self.blocks_keys:
            assert code is CODES.LLM_REPEAT_REQUEST
            return
        assert code is CODES.LLM_SUCCESS
        self.caches[self.next_id] = NaiveCache(num_slots, 0, is_blocks, is_registered=True)
        if is_blocks and model_id is not None:
            self.blocks_keys[model_id] = self.next_id
        self.next_id += 1

    @rule(cache_id=st.integers(-1, 12))
    def unregister(self, cache_id):
        code = code_of(self.pool.unregister, cache_id, time.monotonic() - 1)
        if cache_id not in self.held():
            assert code is CODES.LLM_SUCCESS
        elif not self.caches[cache_id].is_registered:
            assert code is CODES.LLM_PARAM_INVALID
        else:
            is_used = any(held == cache_id for _, held, _, _ in self.holds)
            assert code is (CODES.LLM_WAIT_PROCESS_TIMEOUT if is_used else CODES.LLM_SUCCESS)
            self.caches[cache_id].has_handle = False
            self.keys = {name: one for name, one in self.keys.items() if one[0] != cache_id}
            self.blocks_keys = {model: one for model, one in self.blocks_keys.items() if one != cache_id}

    @rule()
    def memory_gets_scarce_or_not(self):
        self.is_memory_scarce = not self.is_memory_scarce

    @rule(cache_id=st.integers(0, 12), keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def bind(self, cache_id, keys):
        cache = self.caches.get(cache_id)
        if cache is None or not cache.has_handle or cache.is_blocks:
            return
        names = self.names(keys)
        expected = CODES.LLM_SUCCESS
        if any(name in self.keys for name in names):
            expected = CODES.LLM_REPEAT_REQUEST
        if len(keys) > cache.num_slots:
            expected = CODES.LLM_PARAM_INVALID
        assert code_of(self.pool.bind, self.pool.cache(cache_id), keys) is expected
        if expected is CODES.LLM_SUCCESS:
            self.keys.update({name: (cache_id, slot, object()) for name, slot in names.items()})

    @rule(cache_id=st.integers(0, 12), is_dropped=st.booleans())
    def release_handle(self, cache_id, is_dropped):
        (self.pool.drop_handle if is_dropped else self.pool.release_handle)(cache_id)
        if cache_id in self.caches:
            self.caches[cache_id].has_handle = False
            self.blocks_keys = {model: one for model, one in self.blocks_keys.items() if one != cache_id}

    @rule(key=st.sampled_from(KEYS))
    def remove_key(self, key):
        self.pool.remove_key(key)
        self.keys.pop(name_of(key), None)

    @rule(req_id=st.integers(0, 3))
    def remove_request(self, req_id):
        self.pool.remove_request(req_id)
        self.keys = {name: one for name, one in self.keys.items() if name[:2] != ("request", req_id)}

    @rule(key=st.sampled_from(KEYS))
    def hold_key(self, key):
        name = name_of(key)
        if name not in self.keys:
            assert code_of(self.pool.hold_key, key) is CODES.LLM_KV_CACHE_NOT_EXIST
            return
        hold = self.pool.hold_key(key)
        cache_id, slot, life = self.keys[name]
        assert (hold.cache.cache_id, hold.slot) == (cache_id, slot)
        self.holds.append((hold, cache_id, name if name[0] == "request" else None, life))

    @rule(cache_id=st.integers(-1, 12), slot=st.integers(0, 4))
    def hold_slot(self, cache_id, slot):
        cache = self.caches.get(cache_id)
        if cache is None or not cache.has_handle:
            assert code_of(self.pool.hold_slot, cache_id, slot) is CODES.LLM_KV_CACHE_NOT_EXIST
        elif cache.is_blocks or slot >= cache.num_slots:
            assert code_of(self.pool.hold_slot, cache_id, slot) is CODES.LLM_PARAM_INVALID
        else:
            self.holds.append((self.pool.hold_slot(cache_id, slot), cache_id, None, None))

    @rule(model_id=st.integers(0, 2))
    def hold_blocks(self, model_id):
        if model_id not in self.blocks_keys:
            assert code_of(self.pool.hold_blocks, model_id) is CODES.LLM_KV_CACHE_NOT_EXIST
            return
        hold = self.pool.hold_blocks(model_id)
        assert (hold.cache.cache_id, hold.slot) == (self.blocks_keys[model_id], None)
        self.holds.append((hold, self.blocks_keys[model_id], None, None))

    @rule(cache_id=st.integers(-1, 12))
    def hold_numbered_blocks(self, cache_id):
        cache = self.caches.get(cache_id)
        if cache is None or not cache.has_handle:
            assert code_of(self.pool.hold_numbered_blocks, cache_id) is CODES.LLM_KV_CACHE_NOT_EXIST
        elif not cache.is_blocks:
            assert code_of(self.pool.hold_numbered_blocks, cache_id) is CODES.LLM_PARAM_INVALID
        else:
            self.holds.append((self.pool.hold_numbered_blocks(cache_id), cache_id, None, None))

    @precondition(lambda self: self.holds)
    @rule(index=st.integers(0, 100), consume=st.booleans(), again=st.booleans())
    def end_hold(self, index, consume, again):
        hold, _, name, life = self.holds.pop(index % len(self.holds))
        hold.end(consume=consume)
        if consume and name in self.keys and self.keys[name][2] is life:
            del self.keys[name]
        if again:
            hold.end(consume=True)  # changes nothing

    @invariant()
    def nothing_is_lost_and_nothing_is_kept(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.used_bytes == self.used_bytes()
        assert self.pool.num_caches == len(self.held())
        for key in KEYS:
            assert self.pool.is_bound(key) == (name_of(key) in self.keys)

    def teardown(self):
        if hasattr(self, "pool"):
            self.pool.close()
            for hold, *_ in self.holds:
                hold.end(consume=True)
            assert (self.pool.used_bytes, self.pool.num_caches) == (0, 0)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_memory_that_becomes_available_too_late_is_not_kept():
    def finalize_meanwhile(_desc):
        pool.close()
        return object()

    pool = CachePool(finalize_meanwhile)
    assert code_of(pool.allocate, desc(1)) is CODES.LLM_ENGINE_FINALIZED
    assert code_of(pool.allocate, desc(1)) is CODES.LLM_ENGINE_FINALIZED
    assert pool.num_caches == 0


def test_a_handle_may_be_dropped_while_the_pool_is_in_use():
    """Garbage collection runs finalizers anywhere, also in a thread that holds the pool's lock."""

    class Cycle:
        pass

    def collect_garbage_meanwhile(_desc):
        cycle = Cycle()
        cycle.itself = cycle
        weakref.finalize(cycle, pool.drop_handle, first.cache_id)
        del cycle
        with pool._lock:
            gc.collect()
        return object()

    def allocate(wanted):
        return allocators.pop()(wanted)

    allocators = [collect_garbage_meanwhile, lambda _desc: object()]
    pool = CachePool(allocate)
    first = pool.allocate(desc(1))
    second = pool.allocate(desc(1))
    assert code_of(pool.cache, first.cache_id) is CODES.LLM_KV_CACHE_NOT_EXIST
    assert pool.cache(second.cache_id) is second
    assert pool.num_caches == 1


def test_the_memory_of_a_cache_goes_with_its_last_holder():
    class Memory:
        pass

    pool = CachePool(lambda _desc: Memory())
    memory = weakref.ref(pool.allocate(desc(2), [KEYS[0]]).memory)
    hold = pool.hold_key(KEYS[0])
    pool.release_handle(1)
    pool.remove_key(KEYS[0])
    assert memory() is not None
    hold.end(consume=False)
    del hold
    assert memory() is None


@pytest.mark.parametrize("limit", [0, 15])
def test_the_limit_is_named_with_its_option(limit):
    pool = CachePool(lambda _desc: object(), limit)
    with pytest.raises(LLMException, match=rf"16 bytes .* {limit} bytes.*ge.flowGraphMemMaxSize"):
        pool.allocate(desc(2))


def test_unregistering_waits_for_the_last_transfer():
    pool = CachePool(lambda _desc: object())
    memory = object()
    cache = pool.register(desc(2), memory)
    pool.bind(cache, [KEYS[0]])
    holds = [pool.hold_key(KEYS[0]), pool.hold_slot(1, 1)]
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(pool.unregister(1, time.monotonic() + 60)))
    waiting.start()
    while pool.is_bound(KEYS[0]):
        pass
    holds[0].end(consume=True)
    assert code_of(pool.hold_slot, 1, 0) is CODES.LLM_KV_CACHE_NOT_EXIST
    assert not answers
    holds[1].end(consume=False)
    waiting.join()
    assert answers == [memory]
    assert pool.unregister(1, time.monotonic()) is None


def test_unregistering_ends_with_the_pool():
    pool = CachePool(lambda _desc: object())
    pool.register(desc(1), object())
    pool.hold_slot(1, 0)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(pool.unregister(1, time.monotonic() + 60)))
    waiting.start()
    while code_of(pool.cache, 1) is CODES.LLM_SUCCESS:
        pass
    pool.close()
    waiting.join()
    assert len(answers) == 1
