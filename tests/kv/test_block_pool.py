from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kv.block_hash import BlockKey
from quire.kv.block_pool import BlockPool


def key(number: int) -> BlockKey:
    return BlockKey(b"digest %d" % number, b"parent", b"tokens %d" % number)


class PoolMachine(RuleBasedStateMachine):
    """The pool against plain lists: tables, a list of idle blocks by age, a dict of contents."""

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.idle: list[int] = []
        self.contents: dict[int, int] = {}

    def held(self):
        return [block for table in self.tables for block in table]

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        free = self.pool.num_blocks - len(set(self.held()))
        if count > free:
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        blank = free - len(self.idle)
        evicted = [self.idle.pop(0) for _ in range(max(count - blank, 0))]
        for block in evicted:
            del self.contents[block]
        taken = self.pool.allocate(count).tolist()
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held())
        assert set(evicted) <= set(taken)
        self.tables.append(taken)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), number=st.integers(0, 8))
    def cache(self, data, number):
        block = data.draw(st.sampled_from(self.held()))
        self.pool.cache(block, key(number))
        if block not in self.contents and number not in self.contents.values():
            self.contents[block] = number

    @rule(numbers=st.lists(st.integers(0, 8), unique=True, max_size=4))
    def hit(self, numbers):
        by_content = {number: block for block, number in self.contents.items()}
        expected = []
        for number in numbers:
            if number not in by_content:
                break
            expected.append(by_content[number])
        found = self.pool.find([key(number) for number in numbers])
        assert found == expected
        assert self.pool.count_idle(found) == len(set(found) & set(self.idle))
        self.pool.acquire(found)
        self.idle = [block for block in self.idle if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        still_held = set(self.held())
        self.idle += [block for block in table if block not in still_held and block in self.contents]

    @rule()
    def forget(self):
        self.pool.forget_contents()
        self.contents.clear()
        self.idle.clear()

    @invariant()
    def identities(self):
        if hasattr(self, "pool"):
            self.pool.check(self.held())
            assert self.pool.num_in_use == len(set(self.held()))
            assert self.pool.num_cached == len(self.contents)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_digest_that_collides_is_a_miss():
    pool = BlockPool(2)
    (block,) = pool.allocate(1).tolist()
    pool.cache(block, BlockKey(b"same", b"parent", b"mine"))
    assert pool.find([BlockKey(b"same", b"parent", b"yours")]) == []
    assert pool.find([BlockKey(b"same", b"other parent", b"mine")]) == []
    assert pool.find([BlockKey(b"same", b"parent", b"mine")]) == [block]


def test_releasing_too_often_is_an_error():
    pool = BlockPool(1)
    block_ids = pool.allocate(1).tolist()
    pool.release(block_ids)
    with pytest.raises(ValueError, match="more often"):
        pool.release(block_ids)
