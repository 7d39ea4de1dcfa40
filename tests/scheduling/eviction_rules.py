"""Cache eviction in plain Python, from the rules alone: when blocks go and how many; which, by chance."""

from __future__ import annotations

import zlib

Held = list[tuple[int, int]]
"""Position and token of all that one sequence has in the cache, in the order of positions."""


class EvictionRules:
    """Sizes are tokens, as in `CacheEvictionConfig`."""

    def __init__(self, config, block_size: int) -> None:
        self.block_size = block_size
        self.start, self.recent = config.start_size, config.recent_size
        self.most = config.max_cache_size
        crush = config.kvcrush_config
        ignores_crush = crush is None or config.aggregation_mode == "adaptive_rkv"
        self.budget = 0 if ignores_crush else crush.budget

    def num_going(self, num_held: int) -> int:
        """How many blocks go after a step that leaves so many tokens, unless its prompt goes on."""
        if num_held <= self.most + self.block_size - 1:
            return 0
        room = (self.most - self.start - self.recent) // self.block_size
        overflow = len(self._evictable(num_held)) - room
        return overflow - self.budget if overflow >= self.budget else overflow

    def _evictable(self, num_held: int) -> range:
        """The numbers of the blocks between the start and the recent area."""
        size = self.block_size
        return range(self.start // size, num_held // size - self.recent // size)

    def blocks_going(self, blocks: list[Held]) -> list[int]:
        """The numbers of the blocks that go, by what is in all of them and nothing else."""
        num_held = sum(map(len, blocks))
        evictable = self._evictable(num_held)
        last = max(position for block in blocks for position, _ in block)
        by_chance = sorted(evictable, key=lambda number: zlib.crc32(f"{last} {blocks[number]}".encode()))
        return by_chance[: self.num_going(num_held)]

    def kept(self, held: Held) -> Held:
        """What is held after a step that ends with `held`."""
        if not self.num_going(len(held)):
            return held
        size = self.block_size
        blocks = [held[first : first + size] for first in range(0, len(held), size)]
        going = self.blocks_going(blocks)
        return [pair for number, block in enumerate(blocks) if number not in going for pair in block]

    def first_stop(self, num_prompt: int, computed: int, evicted: int, known: int) -> int:
        """How many tokens a step computes at most: up to the prompt's end, or until blocks go."""
        if computed < num_prompt:
            return num_prompt - computed
        for count in range(1, known - computed):
            if self.num_going(computed - evicted + count):
                return count
        return known - computed

    def max_held(self, num_prompt: int, num_tokens: int, computed: int = 0, evicted: int = 0) -> int:
        """How many tokens are held at most from now on until `num_tokens` have been computed."""
        held = most = max(computed, num_prompt) - evicted
        for _ in range(max(computed, num_prompt), num_tokens):
            held += 1 - self.num_going(held) * self.block_size
            most = max(most, held)
        return most


def rules_of(config) -> EvictionRules | None:
    """Return the rules by which a scheduler evicts; None if it does not."""
    if not config.use_cache_eviction:
        return None
    return EvictionRules(config.cache_eviction_config, config.block_size)
