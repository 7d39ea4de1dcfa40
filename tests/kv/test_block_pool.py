from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kv.blocks.block_pool import BlockPool
from unmutated import UNMUTATED


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


ROOT = digest(99)


def cache(pool: BlockPool, block: int, number: int, parent: bytes = ROOT, token: int | None = None) -> None:
    tokens = np.array([[number if token is None else token]], np.int32)
    pool.cache(np.array([block], np.int32), [digest(number)], [parent], tokens)


def find(pool: BlockPool, numbers: list[int], tokens: list[int] | None = None) -> list[int]:
    """As if each content followed the root itself: what the pool compares is up to its caller."""
    found = []
    for number, token in zip(numbers, numbers if tokens is None else tokens, strict=True):
        hit = pool.find(ROOT, [digest(number)], np.array([[token]], np.int32))
        if not hit.size:
            break
        found += hit.tolist()
    return found


class PoolMachine(RuleBasedStateMachine):
    """The pool against plain lists: tables, a list of idle blocks by age, a dict of contents."""

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks):
        self.pool = BlockPool(num_blocks, 1)
        self.tables: list[list[int]] = []
        self.idle: list[int] = []
        self.contents: dict[int, int] = {}
        self.num_evicted = 0

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
        self.num_evicted += len(evicted)
        taken = self.pool.allocate(count).tolist()
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held())
        assert set(evicted) <= set(taken)
        self.tables.append(taken)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), number=st.integers(0, 8))
    def cache(self, data, number):
        block = data.draw(st.sampled_from(self.held()))
        if block in self.contents:
            return
        cache(self.pool, block, number)
        if number not in self.contents.values():
            self.contents[block] = number

    @rule(numbers=st.lists(st.integers(0, 8), unique=True, max_size=4))
    def hit(self, numbers):
        by_content = {number: block for block, number in self.contents.items()}
        expected = []
        for number in numbers:
            if number not in by_content:
                break
            expected.append(by_content[number])
        found = find(self.pool, numbers)
        assert found == expected
        assert self.pool.count_idle(np.array(found, np.int32)) == len(set(found) & set(self.idle))
        self.pool.acquire(np.array(found, np.int32))
        self.idle = [block for block in self.idle if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(np.array(table, np.int32))
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
            assert self.pool.num_idle == len(self.idle)
            assert self.pool.num_evicted == self.num_evicted


TestPool = PoolMachine.TestCase
TestPool.settings = settings(backend=UNMUTATED, max_examples=90, stateful_step_count=40)


def test_a_digest_that_collides_is_a_miss():
    pool = BlockPool(2, 1)
    (block,) = pool.allocate(1)
    cache(pool, block, 7)
    assert find(pool, [7], tokens=[8]) == []
    assert pool.find(digest(1), [digest(7)], np.array([[7]], np.int32)).size == 0, "another parent"
    assert find(pool, [7]) == [block]


def test_only_the_run_before_a_collision_is_found():
    pool = BlockPool(3, 1)
    blocks = pool.allocate(3)
    chain = [ROOT, digest(1), digest(2), digest(3)]
    pool.cache(blocks, chain[1:], chain[:-1], np.array([[1], [2], [3]], np.int32))
    assert pool.find(ROOT, chain[1:], np.array([[1], [2], [3]], np.int32)).tolist() == blocks.tolist()
    assert pool.find(ROOT, chain[1:], np.array([[1], [5], [3]], np.int32)).tolist() == blocks[:1].tolist()
    assert pool.find(ROOT, chain[1:3], np.array([[1], [2]], np.int32)).tolist() == blocks[:2].tolist()


def test_releasing_too_often_is_an_error():
    pool = BlockPool(1, 1)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(ValueError, match="more often"):
        pool.release(block_ids)
