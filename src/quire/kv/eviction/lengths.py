"""How many blocks a sequence evicts, and when, from lengths alone: the same in all layers."""

from __future__ import annotations

import numpy as np

from quire.config import AggregationMode, CacheEvictionConfig, SchedulerConfig
from quire.step import IntArray


class EvictionLengths:
    """The sizes of `CacheEvictionConfig` in blocks, and what follows from them.

    Args:
        config: whose sizes are multiples of `block_size`.
        block_size: tokens per block.
    """

    def __init__(self, config: CacheEvictionConfig, block_size: int) -> None:
        self.block_size = block_size
        self.num_start_blocks = config.start_size // block_size
        self.num_recent_blocks = config.recent_size // block_size
        self.num_evictable_blocks = config.get_evictable_size() // block_size
        self._max_blocks = config.max_cache_size // block_size
        self.num_retained_blocks = 0
        """Blocks that KVCrush retains of those that overflow, if they are at least so many."""
        if config.aggregation_mode != AggregationMode.ADAPTIVE_RKV:
            self.num_retained_blocks = config.kvcrush_config.budget

    @property
    def start_size(self) -> int:
        """Tokens at the start of a sequence that are never evicted."""
        return self.num_start_blocks * self.block_size

    def num_blocks_to_evict(self, num_held: IntArray) -> IntArray:
        """Return how many blocks go after a step that leaves `num_held` tokens in the cache: [S]."""
        overflow = np.maximum(num_held // self.block_size - self._max_blocks, 0)
        retained = np.where(overflow >= self.num_retained_blocks, self.num_retained_blocks, 0)
        count: IntArray = (overflow - retained).astype(np.int32)
        return count

    def tokens_until_eviction(self, num_held: IntArray) -> IntArray:
        """Return how many tokens more a sequence computes until it evicts again: [S], each at least 1.

        Args:
            num_held: tokens in the cache, after the eviction that they led to.
        """
        next_full = np.maximum(num_held // self.block_size, self._max_blocks) + 1
        # With a KVCrush budget of one block, the first block that overflows stays.
        next_full = next_full + (self.num_blocks_to_evict(next_full * self.block_size) == 0)
        tokens: IntArray = (next_full * self.block_size - num_held).astype(np.int32)
        return tokens

    def max_held(self, num_prompt: IntArray, num_tokens: IntArray) -> IntArray:
        """Return how many tokens a sequence holds at most on its way to `num_tokens`: [S].

        A prompt is held as a whole until it is computed; later a block is evicted as soon as it overflows.
        """
        most_in_prompt = np.maximum(num_prompt, self.max_held_after_prompt(num_prompt))
        most: IntArray = np.minimum(num_tokens, most_in_prompt).astype(np.int32)
        return most

    def max_held_after_prompt(self, num_prompt: IntArray) -> IntArray:
        """Return how many tokens a sequence holds at most after the step that ends its prompt: [S]."""
        # A block that overflows later goes alone, so that KVCrush retains it only with a budget of 1.
        retains = num_prompt // self.block_size - self._max_blocks >= self.num_retained_blocks
        retained = np.where(retains | (self.num_retained_blocks == 1), self.num_retained_blocks, 0)
        most: IntArray = ((self._max_blocks + retained + 1) * self.block_size).astype(np.int32)
        return most


def eviction_lengths(config: SchedulerConfig) -> EvictionLengths | None:
    """Return the lengths by which a scheduler evicts; None if it does not."""
    if not config.use_cache_eviction:
        return None
    return EvictionLengths(config.cache_eviction_config, config.block_size)
