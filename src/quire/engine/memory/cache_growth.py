"""Growth of a KV cache, limited by the memory of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.kv.cache.memory_limits import available_memory

RETRY_INTERVAL = 1.0
"""Seconds to wait after a refusal before asking for memory again."""


class CacheGrowth:
    """Grants blocks of a cache's reserved address space; see `SchedulerContext.commit_blocks`.

    Blocks that were granted but not yet written still count as available memory in the system. So all
    granted blocks are also subtracted from what was available at the start.

    Args:
        bytes_per_block: over all layers.
        spare_bytes: memory to leave free.
        read_available: returns the bytes currently available to this process.
        clock: returns seconds.
    """

    def __init__(
        self,
        bytes_per_block: int,
        *,
        spare_bytes: int,
        read_available: Callable[[], int] = available_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_block = bytes_per_block
        self._spare_bytes = spare_bytes
        self._read_available = read_available
        self._clock = clock
        self._available_at_start = read_available()
        self._granted_bytes = 0
        self._short_until = clock()

    def __call__(self, num_blocks: int) -> int:
        """Return how many of `num_blocks` additional blocks may be used."""
        now = self._clock()
        if now < self._short_until:
            return 0
        left = min(self._read_available(), self._available_at_start - self._granted_bytes)
        granted = min(num_blocks, max(0, left - self._spare_bytes) // self._bytes_per_block)
        self._granted_bytes += granted * self._bytes_per_block
        if granted < num_blocks:
            self._short_until = now + RETRY_INTERVAL
        return granted
