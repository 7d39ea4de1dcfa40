from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from held import num_held
from quire.config import SchedulerConfig
from quire.errors import ConfigError
from quire.kv.blocks.retention import (
    RETENTIONS,
    LeastRecentlyUsed,
    LruBlocks,
    RankedBlocks,
    RetentionPolicy,
    idle_blocks,
)
from quire.limits import limits_of
from unmutated import UNMUTATED


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


class MostRecentlyUsed(RetentionPolicy):
    def rank(self, block):
        return -block.last_used


# What goes first, written down without the classes: by (number of put, hits, priority).
EXPECTED = {
    "lru": lambda put, hits, priority: put,
    "lfu": lambda put, hits, priority: (hits, put),
    "priority": lambda put, hits, priority: (-priority, put),
    f"{__name__}.MostRecentlyUsed": lambda put, hits, priority: -put,
}


class IdleBlocksMachine(RuleBasedStateMachine):
    """The container against a dictionary that is searched each time."""

    retention = "lru"

    @initialize()
    def build(self):
        self.blocks = idle_blocks(self.retention, 13)
        self.model: dict[int, tuple[int, int, int]] = {}
        self.num_puts = 0

    @rule(block_id=st.integers(0, 12), hits=st.integers(0, 2), priority=st.integers(-1, 1))
    def put(self, block_id, hits, priority):
        if block_id in self.model:
            return
        self.blocks.put(ids(block_id), ids(hits), priority)
        self.model[block_id] = (self.num_puts, hits, priority)
        self.num_puts += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def take(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.model)))
        self.blocks.take(ids(block_id))
        del self.model[block_id]

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        order = sorted(self.model, key=lambda block_id: EXPECTED[self.retention](*self.model[block_id]))
        assert self.blocks.evict(min(count, len(order))).tolist() == order[:count]
        for block_id in order[:count]:
            del self.model[block_id]

    @precondition(lambda self: len(self.model) > 5)
    @rule()
    def clear(self):
        assert sorted(self.blocks.clear().tolist()) == sorted(self.model)
        self.model = {}

    @invariant()
    def agrees(self):
        if hasattr(self, "blocks"):
            assert len(self.blocks) == len(self.model)
            assert sorted(self.blocks) == sorted(self.model)


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("retention", EXPECTED)
def test_idle_blocks_agree_with_a_search(retention):
    machine = type("Machine", (IdleBlocksMachine,), {"retention": retention})
    machine.TestCase.settings = settings(backend=UNMUTATED, max_examples=24, stateful_step_count=60)
    machine.TestCase().runTest()


def test_the_names_are_those_of_the_configuration():
    assert tuple(RETENTIONS.known) == limits_of(SchedulerConfig)["prefix_retention"].choices


def test_least_recently_used_needs_no_heap():
    assert isinstance(idle_blocks("lru", 1), LruBlocks)
    assert isinstance(idle_blocks(LeastRecentlyUsed(), 1), LruBlocks)


def test_the_heap_ranks_by_age_as_the_list_does():
    ranked, listed = RankedBlocks(LeastRecentlyUsed()), LruBlocks(6)
    for block_id in (3, 1, 2, 5, 4):
        ranked.put(ids(block_id), ids(0), 0)
        listed.put(ids(block_id), ids(0), 0)
    ranked.take(ids(2))
    listed.take(ids(2))
    assert ranked.evict(4).tolist() == listed.evict(4).tolist() == [3, 1, 5, 4]


def test_a_policy_may_be_given_as_class_or_object():
    for retention in (MostRecentlyUsed, MostRecentlyUsed()):
        blocks = idle_blocks(retention, 3)
        blocks.put(ids(1), ids(0), 0)
        blocks.put(ids(2), ids(0), 0)
        assert blocks.evict(1).tolist() == [2]


@pytest.mark.parametrize(
    "retention", ["lrv", "quire.kv.blocks.retention.Lru", "collections.OrderedDict", 5, None]
)
def test_anything_else_is_refused(retention):
    with pytest.raises(ConfigError, match=r"SchedulerConfig\.prefix_retention is "):
        idle_blocks(retention, 1)


def test_the_heap_does_not_grow_with_hits():
    blocks = idle_blocks("lfu", 2)
    blocks.put(ids(0), ids(0), 0)
    held = num_held(blocks)
    for _ in range(10_000):
        blocks.put(ids(1), ids(5), 0)
        blocks.take(ids(1))
    assert num_held(blocks) <= held + 100
