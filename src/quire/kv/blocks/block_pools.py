"""The block pools of all cache groups, in step with each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.kv.blocks.block_hash import SequenceKeys
from quire.kv.blocks.block_pool import BlockPool
from quire.kv.blocks.groups import NULL_BLOCK, first_in_window
from quire.step import Int64Array, IntArray


class BlockPools:
    """One pool for each cache group, see `quire.kv.blocks.groups`.

    Block ids are [G, blocks], a row for each group. Blocks of all groups are taken together, and released
    together but for those before a window; `NULL_BLOCK` in their place counts for nothing.

    Attributes:
        first: the pool of the group that keeps all tokens.
        windows: the number of each other group, and its window in tokens.

    Args:
        pools: [G], the one of the group that keeps all tokens first; the others have windows.
        windows: [G - 1] of the others, in tokens.
        block_size: tokens per block.
    """

    def __init__(self, pools: Sequence[BlockPool], windows: Iterable[int], block_size: int) -> None:
        self.first = pools[0]
        self.windows = list(enumerate(windows, 1))
        self._pools = pools
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out in every group."""
        return min(pool.num_free for pool in self._pools) if self.windows else self.first.num_free

    @property
    def num_uncommitted(self) -> int:
        """Blocks of any group that memory is reserved for and, as far as is known, available."""
        return (
            sum(pool.num_uncommitted for pool in self._pools) if self.windows else self.first.num_uncommitted
        )

    @property
    def num_in_use(self) -> list[int]:
        """Blocks of each group with a reference count above 0, [G]."""
        return [self.first.num_in_use, *(pool.num_in_use - 1 for pool in self._pools[1:])]

    @property
    def usage(self) -> float:
        """The share of the blocks that is in use, of the group in which it is largest."""
        return max(count / pool.num_blocks for pool, count in zip(self._pools, self.num_in_use, strict=True))

    def num_free_beside(self, block_ids: IntArray) -> int:
        """Return how many blocks are free in every group once `block_ids` [G, blocks] are in use."""
        return min(pool.num_free - pool.count_idle(ids) for pool, ids in self._by_group(block_ids))

    def commit_ahead(self, count: int) -> None:
        """See `BlockPool.commit_ahead`."""
        for pool in self._pools:
            pool.commit_ahead(count)

    def allocate(self, count: int) -> IntArray:
        """Return `count` blocks of each group with reference count 1: [G, count].

        Raises:
            ValueError: fewer than `count` blocks are free in some group; nothing is taken.
        """
        if self.windows:
            self.commit_ahead(count)
            if count > self.num_free:
                raise ValueError(f"{count} KV blocks requested of each group, {self.num_free} are free")
        return np.stack([pool.allocate(count) for pool in self._pools])

    def acquire(self, block_ids: IntArray) -> None:
        """Add one reference to each of `block_ids` [G, blocks]."""
        for pool, ids in self._by_group(block_ids):
            pool.acquire(ids)

    def release(self, block_ids: IntArray, priorities: IntArray | int = 0) -> None:
        """Drop one reference from each of `block_ids` [G, blocks]; see `BlockPool.release`."""
        self.first.release(block_ids[0], priorities)
        for group, _ in self.windows:
            self.release_in(group, block_ids[group], priorities)

    def release_in(
        self,
        group: int,
        block_ids: IntArray,
        priorities: IntArray | Int64Array | int,
        *,
        is_left: bool = False,
    ) -> None:
        """Drop one reference from each of `block_ids` [blocks] of a group with a window."""
        is_block = block_ids != NULL_BLOCK
        if isinstance(priorities, np.ndarray):
            priorities = priorities[is_block]
        self._pools[group].release(block_ids[is_block], priorities, is_left=is_left)

    def count_hit(self, block_ids: IntArray) -> None:
        """Note that a prefix lookup has found and used these blocks [G, blocks]."""
        for pool, ids in self._by_group(block_ids):
            pool.count_hit(ids)

    def cache(self, block_ids: IntArray, chain: list[bytes], parents: list[bytes], tokens: IntArray) -> None:
        """Remember what blocks [G, blocks] hold; see `BlockPool.cache`."""
        self.first.cache(block_ids[0], chain, parents, tokens)
        for pool, ids in zip(self._pools[1:], block_ids[1:], strict=True):
            kept = ids != NULL_BLOCK
            if kept.any():
                digests = list(itertools.compress(chain, kept))
                pool.cache(ids[kept], digests, list(itertools.compress(parents, kept)), tokens[kept])

    def find(self, keys: SequenceKeys, tokens: IntArray) -> IntArray:
        """Return the longest cached prefix of a sequence that all groups serve: [G, blocks]. Changes nothing.

        A group with a window serves a prefix if it has the blocks that the next token sees.

        Args:
            keys: of the sequence.
            tokens: of its full blocks, [N, block_size].
        """
        found = self.first.find(keys.digest(0), keys.digests(0, len(tokens)), tokens)
        if not self.windows:
            return found[None]
        chain, tokens = [keys.digest(0), *keys.digests(0, len(found))], tokens[: len(found)]
        rows = [found, *(pool.lookup(chain, tokens) for pool in self._pools[1:])]
        ends = np.arange(len(found) + 1, dtype=np.int32)
        is_served = np.ones(len(ends), dtype=np.bool_)
        for group, window in self.windows:
            missing = np.where(rows[group] < 0, ends[:-1], -1)
            last_missing = np.concatenate(([-1], np.maximum.accumulate(missing)))
            is_served &= last_missing < first_in_window(ends * self._block_size, window, self._block_size)
        end = int(np.flatnonzero(is_served)[-1])
        block_ids = np.stack(rows)[:, :end].astype(np.int32)
        for group, window in self.windows:
            first = first_in_window(end * self._block_size, window, self._block_size)
            block_ids[group, :first] = NULL_BLOCK
        return block_ids

    def forget_contents(self) -> None:
        """Empty the prefix cache: see `BlockPool.forget_contents`."""
        for pool in self._pools:
            pool.forget_contents()

    def check(self, held: Iterable[IntArray]) -> None:
        """Check invariants 1 and 2 against `held`: [G, blocks] of every holder; see `BlockPool.check`."""
        held = list(held)
        self.first.check(block for ids in held for block in ids[0].tolist())
        for group, _ in self.windows:
            blocks = [block for ids in held for block in ids[group].tolist() if block != NULL_BLOCK]
            self._pools[group].check([NULL_BLOCK, *blocks])

    def _by_group(self, block_ids: IntArray) -> Iterator[tuple[BlockPool, IntArray]]:
        """Yield each pool with its blocks."""
        yield self.first, block_ids[0]
        for pool, ids in zip(self._pools[1:], block_ids[1:], strict=True):
            yield pool, ids[ids != NULL_BLOCK]
