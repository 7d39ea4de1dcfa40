"""A tier whose blocks that were read or written last are in host memory, too, and found there first."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.block_memory import BlockMemory
from quire.kv.tiers.tier import BlockTier

CHECKED_BLOCKS = 64
"""Blocks in memory of which a refresh sees whether the tier still has them."""


class CachedTier(BlockTier):
    """Writes blocks to both, and has no block that the tier does not have, as far as that is known.

    What is on a disk is not read as long as it is in memory, so nobody would notice if it were damaged: some
    blocks at a time are checked (`BlockTier.check`).

    Args:
        tier: a slower one.
        capacity_bytes: maximum number of bytes to keep in memory, of at least one block; no more than the
            tier has are taken.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, tier: BlockTier, capacity_bytes: int) -> None:
        super().__init__(tier.residents, tier.bytes_per_block, tier.bytes_per_place)
        self._tier = tier
        num_blocks = min(capacity_bytes // tier.bytes_per_block, tier.residents.num_places)
        self._memory = BlockMemory(num_blocks, tier.bytes_per_block)
        self._lock = threading.Lock()
        self._places: OrderedDict[BlockKey, int] = OrderedDict()  # in memory, of the generation
        self._generation = self.residents.generation
        self._num_memory_hits = 0
        self._num_checked = 0

    @property
    @override
    def num_memory_hits(self) -> int:
        return self._num_memory_hits

    @property
    @override
    def is_writable(self) -> bool:
        return self._tier.is_writable

    @override
    def count_in_memory(self, keys: Iterable[BlockKey]) -> int:
        places = self._places
        return sum(key in places for key in keys)

    @override
    def read(self, key: BlockKey, into: ByteArray) -> bool:
        with self._lock:
            self._forget_former()
            generation = self._generation
            place = self._places.get(key)
            if place is not None:
                self._places.move_to_end(key)
                self._memory.hold(place)
                self._num_memory_hits += 1
                content = self._memory.blocks[place]
        if place is not None:
            np.copyto(into, content)
            with self._lock:
                self._memory.release(place)
            return True
        if not self._tier.read(key, into):
            return False
        self._keep(key, into, generation)
        return True

    @override
    def prefetch(self, key: BlockKey) -> None:
        if key not in self._places:
            self._tier.prefetch(key)

    @override
    def check(self, key: BlockKey) -> None:
        self._tier.check(key)

    @override
    def write(self, key: BlockKey, content: ByteArray, generation: int) -> bool:
        is_written = self._tier.write(key, content, generation)
        if is_written:
            self._keep(key, content, generation)
        return is_written

    def _keep(self, key: BlockKey, content: ByteArray, generation: int) -> None:
        """Copy a block of a generation to memory, unless it is there or forgotten."""
        with self._lock:
            self._forget_former()
            if generation != self._generation or key in self._places:
                return
            place = self._memory.take()
            while place is None and self._places:
                _, oldest = self._places.popitem(last=False)
                self._memory.release(oldest)
                place = self._memory.take()  # none while somebody reads what was there
            if place is None:
                return
            copy = self._memory.blocks[place]
        np.copyto(copy, content)
        with self._lock:
            self._forget_former()
            if generation == self._generation and key not in self._places:
                self._places[key] = place
            else:
                self._memory.release(place)

    def _forget_former(self) -> None:
        """Forget blocks of an earlier generation; the lock is held."""
        if self._generation != self.residents.generation:
            self._generation = self.residents.generation
            for place in self._places.values():
                self._memory.release(place)
            self._places.clear()

    @override
    def refresh(self) -> None:
        self._tier.refresh()
        with self._lock:
            self._forget_former()
            first = self._num_checked % max(1, len(self._places))
            keys = list(itertools.islice(self._places, first, first + CHECKED_BLOCKS))
        self._num_checked = first + len(keys)
        for key in keys:
            self._tier.check(key)

    @override
    def clear(self) -> None:
        self._tier.clear()
        with self._lock:
            self._forget_former()

    @override
    def close(self) -> None:
        self._tier.close()
        with self._lock:
            self._forget_former()
            self._memory.close()
