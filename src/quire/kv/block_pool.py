"""The one owner of KV blocks: who holds them, which are free, and what idle ones still contain.

A block is in exactly one of three places: *in use* (reference count above 0), *idle* (count 0, content
cached, reusable by a prefix hit until it is evicted, least recently used first), or *blank* (count 0, no
content worth keeping). Free means blank or idle. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

import numpy as np

from quire.kv.block_hash import BlockKey
from quire.step import IntArray


class BlockPool:
    """Reference counts, free blocks and cached contents of `num_blocks` KV blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._blank: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._contents: dict[int, BlockKey] = {}
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: blank and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Blocks with a reference count above 0."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks whose content a prefix hit can find, in use or idle."""
        return len(self._contents)

    def allocate(self, count: int) -> IntArray:
        """Return `count` block ids with reference count 1; blank blocks go first, then idle ones by age.

        Raises:
            ValueError: fewer than `count` blocks are free; nothing is taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} KV blocks asked for, {self.num_free} of {self.num_blocks} free")
        taken = [self._blank.popleft() if self._blank else self._evict_oldest() for _ in range(count)]
        block_ids = np.array(taken, dtype=np.int32)
        self._counts[block_ids] = 1
        return block_ids

    def acquire(self, block_ids: list[int]) -> None:
        """Add one reference to each of `block_ids` (no duplicates), cached blocks found by `find`."""
        for block_id in block_ids:
            self._idle.pop(block_id, None)
        self._counts[block_ids] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block, in order: of idle blocks, the first given is evicted first."""
        counts = self._counts
        for block_id in block_ids:
            counts[block_id] -= 1
            if counts[block_id] > 0:
                continue
            if counts[block_id] < 0:
                raise ValueError(f"KV block {block_id} released more often than it was taken")
            if block_id in self._contents:
                self._idle[block_id] = None
            else:
                self._blank.append(block_id)

    def cache(self, block_id: int, key: BlockKey) -> None:
        """Remember that a block in use holds `key`; a second block with the same content stays unknown."""
        if key.digest not in self._by_digest and block_id not in self._contents:
            self._by_digest[key.digest] = block_id
            self._contents[block_id] = key

    def find(self, keys: list[BlockKey]) -> list[int]:
        """Return the block ids of the longest cached run at the start of `keys`. Changes nothing."""
        found: list[int] = []
        for key in keys:
            block_id = self._by_digest.get(key.digest)
            if block_id is None or self._contents[block_id] != key:
                break
            found.append(block_id)
        return found

    def count_idle(self, block_ids: list[int]) -> int:
        """Return how many of `block_ids` are idle, that is, how many free blocks acquiring them takes."""
        return sum(block_id in self._idle for block_id in block_ids)

    def forget_contents(self) -> None:
        """Empty the prefix cache: no block's content can be found any more. Blocks in use stay in use."""
        self._blank.extend(self._idle)
        self._idle.clear()
        self._contents.clear()
        self._by_digest.clear()

    def check(self, held: Iterable[int]) -> None:
        """Check invariants 1 and 2 against `held`: every block id of every table, with repetition.

        Raises:
            AssertionError: names the identity that does not hold, with the numbers.
        """
        expected = np.bincount(np.fromiter(held, dtype=np.int64), minlength=self.num_blocks)
        wrong = np.flatnonzero(expected != self._counts)
        assert not wrong.size, f"invariant 2: counts of blocks {wrong[:8].tolist()} differ from the tables"
        free = set(self._blank) | set(self._idle)
        in_use = set(np.flatnonzero(self._counts > 0).tolist())
        assert len(free) == self.num_free, "invariant 1: a block is free twice"
        assert not free & in_use, f"invariant 1: blocks {sorted(free & in_use)[:8]} free and in use"
        assert len(free) + len(in_use) == self.num_blocks, "invariant 1: a block is neither free nor in use"
        assert set(self._idle) == set(self._contents) - in_use, (
            "invariant 1: idle blocks are not the cached ones"
        )
        assert {key.digest: block for block, key in self._contents.items()} == self._by_digest, (
            "invariant 1: the prefix index and the blocks' contents differ"
        )

    def _evict_oldest(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        del self._by_digest[self._contents.pop(block_id).digest]
        return block_id
