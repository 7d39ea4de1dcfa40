"""A random life of a PROMPT and a DECODER beside a naive model of their caches, keys, memory and link."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import sides
from conformance import row
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

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

POOL = 450  # bytes: about ten caches
LIKELY = 0.94  # how often a choice is one that may succeed
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


class Choices(random.Random):
    def likely(self, preferred: Sequence[Any], others: Sequence[Any]) -> Any:
        """Return one of `preferred`, but now and then one of `others`; None if there is none."""
        of = preferred if preferred and self.random() < LIKELY else others
        return self.choice(of) if of else None

    def desc(self) -> CacheDesc:
        return CacheDesc(
            self.likely([2], [4]),
            [self.randint(1, 3), self.choice([8, 8, 12])],
            self.likely([DataType.DT_UINT8], [DataType.DT_INT8]),
        )


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

    def live(self, *, is_blocks: bool | None = None) -> list[NaiveCache]:
        """Return the caches that have their handle, of one kind or both."""
        return [one for one in self.caches if one.has_handle and is_blocks in {None, one.is_blocks}]


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
        self.link(Choices(0))

        self.num_events = 0
        for seed in range(6):
            self.allocate_on_the_prompt(Choices(seed))
            self.allocate_on_the_decoder(Choices(seed))

    # One number for all choices of an event: hypothesis varies the sequence of events.
    @rule(seed=st.integers(0, 1000))
    def event(self, seed: int) -> None:
        self.num_events += 1
        choose = Choices(f"{seed} {self.num_events}")
        (event,) = choose.choices(list(self.EVENTS), list(self.EVENTS.values()))
        if self.link_state != "up" and choose.random() < 0.3:
            event = PairMachine.unlink if self.link_state == "broken" else PairMachine.link
        event(self, choose)

    def teardown(self) -> None:
        self.decoder.finalize()
        self.prompt.finalize()

    # Caches

    def allocate_on_the_prompt(self, choose: Choices) -> None:
        side, desc = self.sides["prompt"], choose.desc()
        free = [key for key in KEYS if key not in self.keys]
        num_keys = choose.likely(range(desc.batch_size + 1), [4])
        keys = [choose.likely(free, KEYS) for _ in range(num_keys)]
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

    def allocate_on_the_decoder(self, choose: Choices) -> None:
        side, desc = self.sides["decoder"], choose.desc()
        real = outcome(lambda: side.manager.allocate_cache(desc), self._codes_of_allocation(side, desc))
        if real is not None:
            self._add(side, real, desc)

    def allocate_blocks(self, choose: Choices) -> None:
        name, desc = choose.choice(["prompt", "decoder"]), choose.desc()
        side, codes = self.sides[name], self._codes_of_allocation(self.sides[name], desc)
        model_id = choose.likely([0, 1], [None]) if name == "prompt" else choose.likely([None], [0, 1])
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

    def write(self, choose: Choices) -> None:
        for side in self.sides.values():
            for cache in side.caches:
                if cache.has_handle:
                    seed = choose.randrange(1000)
                    sides.write_cache(side.manager, cache.real, seed)
                    cache.data[:] = sides.pattern(cache.desc, seed)

    def deallocate(self, choose: Choices) -> None:
        side = choose.choice(list(self.sides.values()))
        cache = choose.likely(side.live(), side.caches)
        if cache is None:
            return
        side.manager.deallocate_cache(cache.real)
        cache.has_handle = False
        self.blocks_keys = {key: one for key, one in self.blocks_keys.items() if one is not cache}

    def remove_key(self, choose: Choices) -> None:
        key = choose.choice(KEYS)
        self.sides["prompt"].manager.remove_cache_key(key)
        self._consume(key)

    # Pulls

    def pull(self, choose: Choices) -> None:
        key = choose.likely(list(self.keys), KEYS)
        source, source_slot = self.keys.get(key, (None, 0))
        target, slot = self._choose_target(choose, source)
        if target is None:
            return
        size = choose.likely([-1], [1, 5, 8, 12, 13])
        source_offset, offset = (choose.likely([None], [0, 0, 3, 8]) for _ in range(2))
        layer = choose.likely([None], [0, 1, 2])
        options: dict[str, Any] = {"src_cache_offset": source_offset, "dst_cache_offset": offset}
        if layer is not None:
            options |= {"src_layer_range": range(0, 1), "dst_layer_range": range(layer, layer + 1)}
        codes = self._codes_of_pull(
            source, target, slot, size, source_offset or 0, offset or 0, all_layers=layer is None
        )
        if key == PLACEHOLDER or (layer is not None and 2 * (layer + 1) > target.desc.num_tensors):
            codes.add(INVALID)
        manager = self.sides["decoder"].manager
        outcome(lambda: manager.pull_cache(key, target.real, slot, size, **options), codes)
        if codes or source is None:
            return
        rows = slice(None) if layer is None else slice(2 * layer, 2 * layer + 2)
        source_rows = slice(None) if layer is None else slice(0, 2)
        start, source_start = offset or 0, source_offset or 0
        count = target.desc.slot_bytes - start if size == -1 else size
        moved = source.data[source_rows, source_slot, source_start : source_start + count]
        target.data[rows, slot, start : start + count] = moved
        if offset is None and source_offset is None and layer is None and key.prefix_id == NO_ID:
            self._consume(key)

    def pull_by_id(self, choose: Choices) -> None:
        prompt = self.sides["prompt"]
        source = choose.likely(
            prompt.live(is_blocks=False), [one for one in prompt.caches if not one.is_blocks]
        )
        target, slot = self._choose_target(choose, source)
        if source is None or target is None:
            return
        source_slot = choose.likely(range(source.desc.batch_size), [3])
        codes = self._codes_of_pull(source if source.has_handle else None, target, slot, -1, 0, 0)
        if source_slot >= source.desc.batch_size:
            codes |= {INVALID, NOT_EXIST}
        key = CacheKeyByIdAndIndex(1, source.real.cache_id, source_slot)
        outcome(lambda: self.sides["decoder"].manager.pull_cache(key, target.real, slot), codes)
        if not codes:
            target.data[:, slot] = source.data[:, source_slot, : target.desc.slot_bytes]

    def pull_blocks(self, choose: Choices) -> None:
        model_id = choose.likely(list(self.blocks_keys), [0, 1])
        source = self.blocks_keys.get(model_id)
        target, _ = self._choose_target(choose, source, is_blocks=True)
        if target is None:
            return
        num_blocks = choose.likely([target.desc.batch_size], [4])
        blocks = choose.sample(range(num_blocks), choose.randint(1, num_blocks))
        blocks += choose.likely([[]], [[0], [1, 2]])
        num_sources = source.desc.batch_size if source else 3
        source_blocks = [choose.likely(range(num_sources), range(4)) for _ in blocks]
        source_blocks += choose.likely([[]], [[0]])
        codes = self._codes_of_link() | self._codes_of_handle(target, is_blocks=True)
        if source is None:
            codes.add(NOT_EXIST)
        elif not self._match(source, target) or source.desc.slot_bytes != target.desc.slot_bytes:
            codes.add(INVALID)
        if len(source_blocks) != len(blocks) or len(set(blocks)) < len(blocks):
            codes.add(INVALID)
        if max(blocks) >= target.desc.batch_size or max(source_blocks) >= num_sources:
            codes.add(INVALID)
        key, manager = BlocksCacheKey(1, model_id), self.sides["decoder"].manager
        outcome(lambda: manager.pull_blocks(key, target.real, source_blocks, blocks), codes)
        if not codes and source is not None:
            target.data[:, blocks] = source.data[:, source_blocks]

    # Copies

    def copy(self, choose: Choices) -> None:
        side = choose.choice(list(self.sides.values()))
        source = choose.likely(side.live(is_blocks=False), side.caches)
        if source is None:
            return
        target = choose.likely(
            [one for one in side.live(is_blocks=False) if self._fits(source, one)], side.caches
        )
        to_slot, from_slot = (choose.likely(range(one.desc.batch_size), [3]) for one in (target, source))
        codes = self._codes_of_handle(target) | self._codes_of_handle(source)
        if not self._fits(source, target):
            codes.add(INVALID)
        if to_slot >= target.desc.batch_size or from_slot >= source.desc.batch_size:
            codes.add(INVALID)
        outcome(lambda: side.manager.copy_cache(target.real, source.real, to_slot, from_slot), codes)
        if not codes:
            target.data[:, to_slot] = source.data[:, from_slot, : target.desc.slot_bytes]

    def copy_blocks(self, choose: Choices) -> None:
        side = choose.choice(list(self.sides.values()))
        cache = choose.likely(side.live(is_blocks=True), side.caches)
        if cache is None:
            return
        order = list(range(cache.desc.batch_size))
        choose.shuffle(order)
        blocks = {source: [target] for source, target in enumerate(order)}
        blocks = choose.likely([blocks], [{0: [1, 2]}, {0: [1], 1: [1]}, {0: [0, 3]}, {3: [0]}, {1: []}])
        destinations = [one for some in blocks.values() for one in some]
        codes = self._codes_of_handle(cache, is_blocks=True)
        if len(set(destinations)) < len(destinations):
            codes.add(INVALID)
        if max([*blocks, *destinations]) >= cache.desc.batch_size:
            codes.add(INVALID)
        outcome(lambda: side.manager.copy_blocks(cache.real, blocks), codes)
        if not codes:
            before = cache.data.copy()
            for source, some in blocks.items():
                cache.data[:, some] = before[:, [source]]

    # Links

    def link(self, choose: Choices) -> None:
        expected = SUCCESS if self.link_state == "none" else LLMStatusCode.LLM_ALREADY_LINK
        assert self.decoder.link_clusters([self.peer], sides.PATIENT) == (SUCCESS, [expected])
        if self.link_state == "none":
            self.link_state = "up"

    def unlink(self, choose: Choices) -> None:
        codes = {"none": {NOT_YET}, "up": {SUCCESS}, "broken": {SUCCESS, NOTIFY_FAILED}}[self.link_state]
        assert self.decoder.unlink_clusters([self.peer], sides.PATIENT)[0] in codes
        self.link_state = "none"

    def unlink_both_by_force(self, choose: Choices) -> None:
        codes = {NOT_YET} if self.link_state == "none" else {SUCCESS}
        assert self.decoder.unlink_clusters([self.peer], force=True)[0] in codes
        assert self.prompt.unlink_clusters([self.itself], force=True)[0] in {SUCCESS, NOT_YET}
        self.link_state = "none"

    def unlink_on_the_prompt(self, choose: Choices) -> None:
        expected = SUCCESS if self.link_state == "up" else NOT_YET
        assert self.prompt.unlink_clusters([self.itself], sides.PATIENT)[0] == expected
        if self.link_state == "up":
            self.link_state = "broken"

    def restart_the_prompt(self, choose: Choices) -> None:
        self.prompt.finalize()
        self.prompt.init(sides.options(pool=POOL, listen=f"127.0.0.1:{self.port}"))
        self.sides["prompt"] = NaiveSide(self.prompt.kv_cache_manager)
        self.keys.clear()
        self.blocks_keys.clear()
        if self.link_state == "up":
            self.link_state = "broken"

    def restart_the_decoder(self, choose: Choices) -> None:
        self.decoder.finalize()
        self.decoder.init(sides.options(pool=POOL))
        self.sides["decoder"] = NaiveSide(self.decoder.kv_cache_manager)
        self.link_state = "none"

    # How often each happens, and what must hold after it

    EVENTS: ClassVar[dict[Callable[[PairMachine, Choices], None], float]] = {
        allocate_on_the_prompt: 4,
        allocate_on_the_decoder: 3,
        allocate_blocks: 6,
        write: 1,
        deallocate: 3,
        remove_key: 1,
        pull: 10,
        pull_by_id: 2,
        pull_blocks: 6,
        copy: 2,
        copy_blocks: 2,
        link: 0.3,
        unlink: 0.3,
        unlink_both_by_force: 0.3,
        unlink_on_the_prompt: 0.3,
        restart_the_prompt: 0.2,
        restart_the_decoder: 0.2,
    }

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
    def _match(source: NaiveCache, target: NaiveCache, *, all_layers: bool = True) -> bool:
        one, other = source.desc, target.desc
        return one.data_type == other.data_type and (not all_layers or one.num_tensors == other.num_tensors)

    def _fits(self, source: NaiveCache, target: NaiveCache) -> bool:
        return self._match(source, target) and target.desc.slot_bytes <= source.desc.slot_bytes

    def _choose_target(
        self, choose: Choices, source: NaiveCache | None, *, is_blocks: bool = False
    ) -> tuple[NaiveCache | None, int]:
        """Choose a cache of the DECODER, and a slot of it."""
        decoder = self.sides["decoder"]
        fitting = [one for one in decoder.live(is_blocks=is_blocks) if source and self._fits(source, one)]
        if not fitting and choose.random() < LIKELY:
            return None, 0
        target = choose.likely(fitting, decoder.caches)
        return target, choose.likely(range(target.desc.batch_size), [3]) if target else 0

    def _codes_of_pull(
        self,
        source: NaiveCache | None,
        target: NaiveCache,
        slot: int,
        size: int,
        source_offset: int,
        offset: int,
        *,
        all_layers: bool = True,
    ) -> set[LLMStatusCode]:
        codes = self._codes_of_link() | self._codes_of_handle(target)
        count = target.desc.slot_bytes - offset if size == -1 else size
        if slot >= target.desc.batch_size or count < 1 or offset + count > target.desc.slot_bytes:
            codes.add(INVALID)
        if source is None:
            codes.add(NOT_EXIST)
        elif (
            not self._match(source, target, all_layers=all_layers)
            or source_offset + count > source.desc.slot_bytes
        ):
            codes.add(INVALID)
        return codes


@pytest.mark.histories
@row("KvCacheManager", "KvCache")
def test_a_random_life_of_a_pair():
    # Shrinking a failure would take longer than a test may.
    few = settings(max_examples=8, stateful_step_count=40, phases=[Phase.reuse, Phase.generate])
    run_state_machine_as_test(PairMachine, settings=few)
