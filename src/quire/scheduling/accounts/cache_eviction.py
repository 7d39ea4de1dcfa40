"""The scheduler's part of cache eviction: how many blocks are evicted, which follows from lengths.

A step ends with the prompt, and with every token after which blocks are evicted. So a preempted request,
whose tokens are all known, is computed again with the same evictions at the same places.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.kv.blocks.manager import KVCacheManager
from quire.kv.eviction.lengths import EvictionLengths
from quire.request import Request
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.outputs import SchedulerStats
from quire.step import EvictionData, IntArray


@dataclasses.dataclass(eq=False)
class CacheEviction:
    """Bounds chunks, shortens block tables, and says how much requests hold. Arrays are [S], one per slot."""

    lengths: EvictionLengths
    running: RunningSlots
    kv: KVCacheManager
    stats: SchedulerStats

    def limit_chunks(self, slots: IntArray, wanted: IntArray) -> IntArray:
        """Return how many of the `wanted` tokens each slot may compute in one step."""
        running = self.running
        computed = running.num_computed[slots]
        most = self._max_tokens(running.num_prompt[slots], computed, computed - running.num_evicted[slots])
        limited: IntArray = np.minimum(wanted, most)
        return limited

    def first_chunk_bound(self, request: Request, num_computed: int) -> int:
        """Return how many tokens a request may compute at once after `num_computed` that were cached."""
        computed = np.array([num_computed], dtype=np.int32)
        return int(self._max_tokens(np.int32(request.num_prompt_tokens), computed, computed)[0])

    def _max_tokens(self, num_prompt: IntArray | np.int32, computed: IntArray, held: IntArray) -> IntArray:
        most: IntArray = np.where(
            computed < num_prompt, num_prompt - computed, self.lengths.tokens_until_eviction(held)
        )
        return most

    def num_held(self, slots: IntArray) -> IntArray:
        """Return how many tokens each slot needs room for, with those that it knows now."""
        running, lengths = self.running, self.lengths
        known, num_prompt = running.num_tokens[slots], running.num_prompt[slots]
        is_in_prompt = running.num_computed[slots] < num_prompt
        later = lengths.max_held_after_prompt(num_prompt)
        most = np.where(is_in_prompt, lengths.max_held(num_prompt, known), later)
        held: IntArray = np.minimum(known - running.num_evicted[slots], most)
        return held

    def max_held(self, num_prompt: IntArray, num_tokens: IntArray) -> IntArray:
        """Return how many tokens requests hold at most on their way to `num_tokens`."""
        return self.lengths.max_held(num_prompt, num_tokens)

    def max_held_by(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens a request holds at most on its way to `num_tokens`."""
        return int(self.lengths.max_held(np.array(request.num_prompt_tokens), np.array(num_tokens)))

    def findable(self, num_computed: IntArray) -> IntArray:
        """Return how many of the computed tokens others may share: those that are never evicted."""
        return np.minimum(num_computed, self.lengths.start_size)

    def num_findable(self, num_computed: int) -> int:
        """Return the same as `findable` for one request."""
        return min(num_computed, self.lengths.start_size)

    def apply(self, slots: IntArray, num_computed: IntArray) -> EvictionData:
        """Take out of the tables the blocks that are evicted after a step, with `num_computed` tokens then.

        The blocks are free at once, because steps are computed in order.
        """
        running, lengths = self.running, self.lengths
        num_evicted = running.num_evicted[slots]
        counts = lengths.num_blocks_to_evict(num_computed - num_evicted)
        counts[num_computed < running.num_prompt[slots]] = 0
        rows = np.flatnonzero(counts)
        if rows.size:
            self.kv.evict(slots[rows], counts[rows], first=lengths.num_start_blocks)
            running.num_evicted[slots[rows]] += counts[rows] * lengths.block_size
            self.stats.num_evicted_blocks += int(counts.sum())
        return EvictionData(num_evicted, counts)
