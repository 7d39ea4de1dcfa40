"""How far a KV cache may grow: as long as the machine has the memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.engine.memory_limits import available_memory

RETRY_INTERVAL = 1.0
"""Seconds for which memory that was short is taken to be short still."""


class CacheGrowth:
    """Grants a cache blocks of its reserved address space; see `SchedulerContext.commit_blocks`.

    What was granted may not have been touched yet, and then still counts as available to the system, so all
    that was granted is also held against what was available at the start.

    Args:
        bytes_per_block: of all layers.
        spare_bytes: memory that is left to everything else.
        read_available: returns the bytes that this process could take now.
        clock: seconds.
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
        """Return how many of `num_blocks` more blocks may be used."""
        now = self._clock()
        if now < self._short_until:
            return 0
        left = min(self._read_available(), self._available_at_start - self._granted_bytes)
        granted = min(num_blocks, max(0, left - self._spare_bytes) // self._bytes_per_block)
        self._granted_bytes += granted * self._bytes_per_block
        if granted < num_blocks:
            self._short_until = now + RETRY_INTERVAL
        return granted
