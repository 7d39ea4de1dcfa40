"""The block pools of all cache groups, in step with each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.kv.blocks.block_hash import SequenceKeys
from quire.kv.blocks.block_pool import BlockPool
from quire.kv.blocks.groups import NULL_BLOCK, first_in_window, first_moved
from quire.step import BoolArray, Int64Array, IntArray


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
        self.all_needed = [0] * len(pools)  # see `allocate`
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

    def num_free_beside(self, block_ids: IntArray, unneeded: Sequence[int]) -> int:
        """Return how many blocks can be allocated once others are in use.

        Args:
            block_ids: the others, [G, blocks].
            unneeded: of the blocks to be allocated, as for `allocate`.
        """
        rows = zip(self._by_group(block_ids), unneeded, strict=True)
        return min(pool.num_free - pool.count_idle(ids) + count for (pool, ids), count in rows)

    def commit_ahead(self, count: int, unneeded: Sequence[int] | None = None) -> None:
        """Make sure that `count` blocks can be allocated; see `BlockPool.commit_ahead`."""
        for pool, num_null in zip(self._pools, unneeded or self.all_needed, strict=True):
            pool.commit_ahead(count - num_null)

    def unneeded(self, num_blocks: int, num_tokens: int) -> list[int]:
        """Return how many blocks of each group, [G], behind some that are there no prefix needs to move.

        Args:
            num_blocks: that are there, from the first on.
            num_tokens: of the prefix.
        """
        first = [first_moved(num_tokens, window, self._block_size) for _, window in self.windows]
        return [0, *(max(int(block) - num_blocks, 0) for block in first)]

    def allocate(self, count: int, unneeded: Sequence[int] | None = None) -> IntArray:
        """Return `count` blocks of each group with reference count 1: [G, count].

        Args:
            count: blocks of a sequence, one after the other.
            unneeded: how many of them, from the first on, are `NULL_BLOCK`, [G]; None: none.

        Raises:
            ValueError: fewer blocks are free in some group; nothing is taken.
        """
        if not self.windows:
            return self.first.allocate(count)[None]
        unneeded = unneeded or self.all_needed
        self.commit_ahead(count, unneeded)
        counts = [count - num_null for num_null in unneeded]
        if any(more > pool.num_free for more, pool in zip(counts, self._pools, strict=True)):
            raise ValueError(f"{counts} KV blocks requested of the groups, {self.num_free} are free in each")
        block_ids = np.full((len(self._pools), count), NULL_BLOCK, dtype=np.int32)
        for ids, num_null, pool in zip(block_ids, unneeded, self._pools, strict=True):
            ids[num_null:] = pool.allocate(count - num_null)
        return block_ids

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
        block_ids = np.stack(rows).astype(np.int32)
        end = self.num_served(block_ids >= 0)
        block_ids = block_ids[:, :end]
        for group, window in self.windows:
            first = first_moved(end * self._block_size, window, self._block_size)
            block_ids[group, :first] = NULL_BLOCK
        return block_ids

    def num_served(self, is_there: BoolArray) -> int:
        """Return how many blocks the longest prefix has that all groups serve.

        Args:
            is_there: whether each group has each block, [G, blocks]; the first group has all.
        """
        ends = np.arange(is_there.shape[1] + 1, dtype=np.int32)
        is_served = np.ones(len(ends), dtype=np.bool_)
        for group, window in self.windows:
            missing = np.where(is_there[group], -1, ends[:-1])
            last_missing = np.concatenate(([-1], np.maximum.accumulate(missing)))
            is_served &= last_missing < first_in_window(ends * self._block_size, window, self._block_size)
        return int(np.flatnonzero(is_served)[-1])

    def leave_windows(self, block_ids: IntArray, num_tokens: int) -> None:
        """Release what no prefix of `num_tokens` moves of blocks [G, blocks]; it becomes `NULL_BLOCK`."""
        for group, window in self.windows:
            before = block_ids[group, : first_moved(num_tokens, window, self._block_size)]
            self.release_in(group, before, 0, is_left=True)
            before[:] = NULL_BLOCK

    def forget_content(self, block_ids: IntArray) -> None:
        """Remove the contents of blocks of the first group from the prefix cache, in all groups."""
        digests = self.first.forget_content(block_ids)
        for pool in self._pools[1:]:
            pool.forget_content(pool.find_each(digests))

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
