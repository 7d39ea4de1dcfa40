"""A random life of a PROMPT and a DECODER beside a naive model of their caches, keys, memory and link."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sides
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conformance import row
from quire.datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMException,
    LLMStatusCode,
)

POOL = 700  # bytes: a handful of caches
NO_ID = 2**64 - 1
PLACEHOLDER = CacheKey(1, NO_ID)
KEYS = [
    PLACEHOLDER,
    *(CacheKey(1, req_id, model_id) for req_id in (0, 1, 2) for model_id in (0, 1)),
    *(CacheKey(1, NO_ID, prefix_id=prefix_id) for prefix_id in (0, 1)),
]

SUCCESS = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK
REPEAT = LLMStatusCode.LLM_REPEAT_REQUEST
OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
NOTIFY_FAILED = LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED

descs = st.builds(
    CacheDesc,
    st.sampled_from([2, 2, 2, 4]),
    st.tuples(st.integers(1, 3), st.sampled_from([8, 8, 12])),
    st.sampled_from([DataType.DT_UINT8] * 4 + [DataType.DT_INT8]),
)
which_side = st.sampled_from(["prompt", "decoder"])
which_cache = st.integers(0, 20)  # modulo how many there are
slots = st.integers(0, 3)
sizes = st.sampled_from([-1, -1, -1, 1, 5, 8, 12, 13])
offsets = st.sampled_from([None, None, None, 0, 3, 8])
layers = st.one_of(st.none(), st.none(), st.integers(0, 2))


@dataclasses.dataclass(eq=False)
class NaiveCache:
    """What a cache is expected to be.

    Attributes:
        data: [num_tensors, slots, slot_bytes].
        keys: those that hold it.
    """

    real: KvCache
    desc: CacheDesc
    is_blocks: bool
    data: np.ndarray
    keys: set[CacheKey] = dataclasses.field(default_factory=set)
    has_handle: bool = True

    @property
    def num_bytes(self) -> int:
        return self.data.size if self.has_handle or self.keys else 0


@dataclasses.dataclass
class NaiveSide:
    manager: KvCacheManager
    caches: list[NaiveCache] = dataclasses.field(default_factory=list)

    @property
    def num_free_bytes(self) -> int:
        return POOL - sum(cache.num_bytes for cache in self.caches)

    def choose(self, number: int) -> NaiveCache | None:
        return self.caches[number % len(self.caches)] if self.caches else None


def outcome(call: Callable[[], Any], codes: set[LLMStatusCode]) -> Any:
    """Make a call that fails with one of `codes`, or succeeds if there are none."""
    if not codes:
        return call()
    with pytest.raises(LLMException) as caught:
        call()
    assert caught.value.status_code in codes, caught.value
    return None


class PairMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = sides.start_prompt(1, pool=POOL)
        self.decoder = sides.start_decoder(2, pool=POOL)
        self.port = self.prompt.listen_port
        self.peer = sides.cluster_info(1, self.port)
        self.itself = sides.cluster_info(2, 0)
        self.sides = {
            "prompt": NaiveSide(self.prompt.kv_cache_manager),
            "decoder": NaiveSide(self.decoder.kv_cache_manager),
        }
        self.keys: dict[CacheKey, tuple[NaiveCache, int]] = {}
        self.blocks_keys: dict[int, NaiveCache] = {}
        self.link_state = "none"
        self.link()

    def teardown(self) -> None:
        self.decoder.finalize()
        self.prompt.finalize()

    # Caches

    @rule(desc=descs, keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def allocate_on_the_prompt(self, desc: CacheDesc, keys: list[CacheKey]) -> None:
        side = self.sides["prompt"]
        codes = self._codes_of_allocation(side, desc)
        if len(keys) > desc.batch_size:
            codes.add(INVALID)
        if set(keys) & set(self.keys):
            codes.add(REPEAT)
        real = outcome(lambda: side.manager.allocate_cache(desc, keys), codes)
        if real is None:
            return
        cache = self._add(side, real, desc)
        for slot, key in enumerate(keys):
            if key != PLACEHOLDER:
                self.keys[key] = cache, slot
                cache.keys.add(key)

    @rule(desc=descs)
    def allocate_on_the_decoder(self, desc: CacheDesc) -> None:
        side = self.sides["decoder"]
        real = outcome(lambda: side.manager.allocate_cache(desc), self._codes_of_allocation(side, desc))
        if real is not None:
            self._add(side, real, desc)

    @rule(name=which_side, desc=descs, model_id=st.sampled_from([None, 0, 1]))
    def allocate_blocks(self, name: str, desc: CacheDesc, model_id: int | None) -> None:
        side = self.sides[name]
        codes = self._codes_of_allocation(side, desc)
        if model_id is not None and name == "decoder":
            codes.add(INVALID)
        if model_id in self.blocks_keys and name == "prompt":
            codes.add(REPEAT)
        key = None if model_id is None else BlocksCacheKey(1, model_id)
        real = outcome(lambda: side.manager.allocate_blocks_cache(desc, key), codes)
        if real is None:
            return
        cache = self._add(side, real, desc, is_blocks=True)
        if model_id is not None:
            self.blocks_keys[model_id] = cache

    @rule(name=which_side, number=which_cache, seed=st.integers(1, 1000))
    def write(self, name: str, number: int, seed: int) -> None:
        cache = self.sides[name].choose(number)
        if cache is not None and cache.has_handle:
            sides.write_cache(self.sides[name].manager, cache.real, seed)
            cache.data[:] = sides.pattern(cache.desc, seed)

    @rule(name=which_side, number=which_cache)
    def deallocate(self, name: str, number: int) -> None:
        cache = self.sides[name].choose(number)
        if cache is None:
            return
        self.sides[name].manager.deallocate_cache(cache.real)
        cache.has_handle = False
        self.blocks_keys = {key: one for key, one in self.blocks_keys.items() if one is not cache}

    @rule(key=st.sampled_from(KEYS))
    def remove_key(self, key: CacheKey) -> None:
        self.sides["prompt"].manager.remove_cache_key(key)
        self._consume(key)

    # Pulls

    @rule(
        key=st.sampled_from(KEYS),
        number=which_cache,
        slot=slots,
        size=sizes,
        source_offset=offsets,
        offset=offsets,
        layer=layers,
    )
    def pull(self, key, number, slot, size, source_offset, offset, layer) -> None:
        target = self.sides["decoder"].choose(number)
        if target is None:
            return
        source, source_slot = self.keys.get(key, (None, 0))
        options = {"src_cache_offset": source_offset, "dst_cache_offset": offset}
        if layer is not None:
            options |= {"src_layer_range": range(0, 1), "dst_layer_range": range(layer, layer + 1)}
        codes = self._codes_of_pull(source, target, slot, size, source_offset or 0, offset or 0)
        if key == PLACEHOLDER:
            codes.add(INVALID)
        if layer is not None and 2 * (layer + 1) > target.desc.num_tensors:
            codes.add(INVALID)
        manager = self.sides["decoder"].manager
        outcome(lambda: manager.pull_cache(key, target.real, slot, size, **options), codes)
        if codes:
            return
        rows = slice(None) if layer is None else slice(2 * layer, 2 * layer + 2)
        source_rows = slice(None) if layer is None else slice(0, 2)
        start, source_start = offset or 0, source_offset or 0
        count = target.desc.slot_bytes - start if size == -1 else size
        moved = source.data[source_rows, source_slot, source_start : source_start + count]
        target.data[rows, slot, start : start + count] = moved
        if offset is None and source_offset is None and layer is None and key.prefix_id == NO_ID:
            self._consume(key)

    @rule(source_number=which_cache, source_slot=slots, number=which_cache, slot=slots)
    def pull_by_id(self, source_number: int, source_slot: int, number: int, slot: int) -> None:
        source = self.sides["prompt"].choose(source_number)
        target = self.sides["decoder"].choose(number)
        if source is None or target is None or source.is_blocks:
            return
        alive = source if source.has_handle else None
        codes = self._codes_of_pull(alive, target, slot, -1, 0, 0)
        if source_slot >= source.desc.batch_size:
            codes |= {INVALID, NOT_EXIST}
        key = CacheKeyByIdAndIndex(1, source.real.cache_id, source_slot)
        outcome(lambda: self.sides["decoder"].manager.pull_cache(key, target.real, slot), codes)
        if not codes:
            target.data[:, slot] = source.data[:, source_slot, : target.desc.slot_bytes]

    @rule(
        model_id=st.sampled_from([0, 1]),
        number=which_cache,
        source_blocks=st.lists(slots, max_size=3),
        blocks=st.lists(slots, max_size=3),
    )
    def pull_blocks(self, model_id: int, number: int, source_blocks: list[int], blocks: list[int]) -> None:
        target = self.sides["decoder"].choose(number)
        if target is None:
            return
        source = self.blocks_keys.get(model_id)
        codes = self._codes_of_link()
        codes |= self._codes_of_handle(target, is_blocks=True)
        if source is None:
            codes.add(NOT_EXIST)
        elif not self._match(source, target) or source.desc.slot_bytes != target.desc.slot_bytes:
            codes.add(INVALID)
        if len(source_blocks) != len(blocks) or len(set(blocks)) < len(blocks):
            codes.add(INVALID)
        if any(block >= target.desc.batch_size for block in blocks):
            codes.add(INVALID)
        if source is not None and any(block >= source.desc.batch_size for block in source_blocks):
            codes.add(INVALID)
        key, manager = BlocksCacheKey(1, model_id), self.sides["decoder"].manager

        def call() -> None:
            manager.pull_blocks(key, target.real, source_blocks, blocks)

        if codes and not source_blocks and not blocks:
            return  # nothing is to be done; which of the checks are made is open
        outcome(call, codes)
        if not codes:
            target.data[:, blocks] = source.data[:, source_blocks]

    # Copies

    @rule(name=which_side, numbers=st.tuples(which_cache, which_cache), chosen=st.tuples(slots, slots))
    def copy(self, name: str, numbers: tuple[int, int], chosen: tuple[int, int]) -> None:
        target, source = (self.sides[name].choose(number) for number in numbers)
        if target is None:
            return
        codes = self._codes_of_handle(target) | self._codes_of_handle(source)
        if not self._match(source, target) or target.desc.slot_bytes > source.desc.slot_bytes:
            codes.add(INVALID)
        if chosen[0] >= target.desc.batch_size or chosen[1] >= source.desc.batch_size:
            codes.add(INVALID)
        outcome(lambda: self.sides[name].manager.copy_cache(target.real, source.real, *chosen), codes)
        if not codes:
            target.data[:, chosen[0]] = source.data[:, chosen[1], : target.desc.slot_bytes]

    @rule(
        name=which_side,
        number=which_cache,
        blocks=st.dictionaries(slots, st.lists(slots, max_size=2), max_size=3),
    )
    def copy_blocks(self, name: str, number: int, blocks: dict[int, list[int]]) -> None:
        cache = self.sides[name].choose(number)
        if cache is None:
            return
        codes = self._codes_of_handle(cache, is_blocks=True)
        destinations = [one for some in blocks.values() for one in some]
        if len(set(destinations)) < len(destinations):
            codes.add(INVALID)
        if any(block >= cache.desc.batch_size for block in [*blocks, *destinations]):
            codes.add(INVALID)
        outcome(lambda: self.sides[name].manager.copy_blocks(cache.real, blocks), codes)
        if not codes:
            before = cache.data.copy()
            for source, some in blocks.items():
                cache.data[:, some] = before[:, [source]]

    # Links

    @precondition(lambda self: self.link_state != "up")
    @rule()
    def link(self) -> None:
        expected = SUCCESS if self.link_state == "none" else LLMStatusCode.LLM_ALREADY_LINK
        assert self.decoder.link_clusters([self.peer], sides.PATIENT) == (SUCCESS, [expected])
        if self.link_state == "none":
            self.link_state = "up"

    @rule()
    def unlink(self) -> None:
        codes = {"none": {NOT_YET}, "up": {SUCCESS}, "broken": {SUCCESS, NOTIFY_FAILED}}[self.link_state]
        assert self.decoder.unlink_clusters([self.peer], sides.PATIENT)[0] in codes
        self.link_state = "none"

    @rule()
    def unlink_both_by_force(self) -> None:
        codes = {NOT_YET} if self.link_state == "none" else {SUCCESS}
        assert self.decoder.unlink_clusters([self.peer], force=True)[0] in codes
        assert self.prompt.unlink_clusters([self.itself], force=True)[0] in {SUCCESS, NOT_YET}
        self.link_state = "none"

    @rule()
    def unlink_on_the_prompt(self) -> None:
        expected = SUCCESS if self.link_state == "up" else NOT_YET
        assert self.prompt.unlink_clusters([self.itself])[0] == expected
        if self.link_state == "up":
            self.link_state = "broken"

    @rule(chance=st.integers(0, 5))
    def restart_the_prompt(self, chance: int) -> None:
        if chance:
            return
        self.prompt.finalize()
        self.prompt.init(sides.options(pool=POOL, listen=f"127.0.0.1:{self.port}"))
        self.sides["prompt"] = NaiveSide(self.prompt.kv_cache_manager)
        self.keys.clear()
        self.blocks_keys.clear()
        if self.link_state == "up":
            self.link_state = "broken"

    @rule(chance=st.integers(0, 5))
    def restart_the_decoder(self, chance: int) -> None:
        if chance:
            return
        self.decoder.finalize()
        self.decoder.init(sides.options(pool=POOL))
        self.sides["decoder"] = NaiveSide(self.decoder.kv_cache_manager)
        self.link_state = "none"

    # What must hold after each

    @invariant()
    def every_byte_is_as_expected(self) -> None:
        for side in self.sides.values():
            for cache in side.caches:
                if cache.has_handle:
                    np.testing.assert_array_equal(sides.read_cache(side.manager, cache.real), cache.data)

    @invariant()
    def the_pool_is_as_full_as_expected(self) -> None:
        for side in self.sides.values():
            free = side.num_free_bytes
            assert not sides.fits(side.manager, free + 1)
            assert not free or sides.fits(side.manager, free)

    def _add(self, side: NaiveSide, real: KvCache, desc: CacheDesc, *, is_blocks: bool = False) -> NaiveCache:
        data = np.zeros((desc.num_tensors, desc.batch_size, desc.slot_bytes), np.uint8)
        side.caches.append(NaiveCache(real, desc, is_blocks, data))
        return side.caches[-1]

    def _consume(self, key: CacheKey) -> None:
        if key in self.keys:
            cache, _ = self.keys.pop(key)
            cache.keys.remove(key)

    @staticmethod
    def _codes_of_allocation(side: NaiveSide, desc: CacheDesc) -> set[LLMStatusCode]:
        return {OUT_OF_MEMORY} if desc.num_tensors * desc.tensor_bytes > side.num_free_bytes else set()

    def _codes_of_link(self) -> set[LLMStatusCode]:
        return set() if self.link_state == "up" else {NOT_YET}

    @staticmethod
    def _codes_of_handle(cache: NaiveCache, *, is_blocks: bool = False) -> set[LLMStatusCode]:
        codes = set() if cache.has_handle else {NOT_EXIST}
        return codes if cache.is_blocks == is_blocks else codes | {INVALID}

    @staticmethod
    def _match(source: NaiveCache, target: NaiveCache) -> bool:
        one, other = source.desc, target.desc
        return (one.num_tensors, one.data_type) == (other.num_tensors, other.data_type)

    def _codes_of_pull(
        self,
        source: NaiveCache | None,
        target: NaiveCache,
        slot: int,
        size: int,
        source_offset: int,
        offset: int,
    ) -> set[LLMStatusCode]:
        codes = self._codes_of_link() | self._codes_of_handle(target)
        count = target.desc.slot_bytes - offset if size == -1 else size
        if slot >= target.desc.batch_size or count < 1 or offset + count > target.desc.slot_bytes:
            codes.add(INVALID)
        if source is None:
            codes.add(NOT_EXIST)
        elif not self._match(source, target) or source_offset + count > source.desc.slot_bytes:
            codes.add(INVALID)
        return codes


@row("KvCacheManager", "KvCache")
def test_a_random_life_of_a_pair():
    few = settings(max_examples=15, stateful_step_count=40)
    run_state_machine_as_test(PairMachine, settings=few)
