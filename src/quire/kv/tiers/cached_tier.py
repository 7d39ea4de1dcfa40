"""A tier with a host memory cache of its most recently read or written blocks."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.tier import BlockTier

CHECKED_BLOCKS = 64
"""Blocks in memory of which a refresh sees whether the tier still has them."""


class CachedTier(BlockTier):
    """Writes blocks to both, and has no block that the tier does not have, as far as that is known.

    What is on a disk is not read as long as it is in memory, so damage would go unnoticed: some
    blocks at a time are checked (`BlockTier.check`).

    Args:
        tier: a slower one.
        capacity_bytes: maximum number of bytes to keep in memory, of at least one block; no more than the
            tier has are taken.

    Raises:
        OSError: there is not enough memory.
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
                place = self._memory.take()  # none while the old content is being read
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


class BlockMemory:
    """Host memory for blocks of one size: numbered places in one mapping.

    The mapping takes memory as places are used for the first time. An allocator would keep what threads free
    for these threads, and take memory for others beside it.

    A place is held by the thread that takes it and by each thread that reads it; it is free when all have
    released it. Only reading and writing `blocks` is thread-safe.

    Args:
        num_places: at least one.
        bytes_per_block: size of a block in each.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, num_places: int, bytes_per_block: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapping = mmap.mmap(-1, num_places * bytes_per_block, flags=flags)
        except OverflowError as error:
            raise OSError(f"{num_places * bytes_per_block} bytes cannot be mapped") from error
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8).reshape(num_places, -1)
        self._num_opened = 0  # places that have been taken at least once
        self._free: list[int] = []  # of those
        self._num_holders: dict[int, int] = {}  # of the others

    def take(self) -> int | None:
        """Return a free place, which is held until `release`; None if there is none."""
        if self._free:
            place = self._free.pop()
        elif self._num_opened < len(self.blocks):
            place = self._num_opened
            self._num_opened += 1
        else:
            return None
        self._num_holders[place] = 1
        return place

    def hold(self, place: int) -> None:
        """Hold a place that is held, until one more `release`."""
        self._num_holders[place] += 1

    def release(self, place: int) -> None:
        """End one `take` or `hold`."""
        self._num_holders[place] -= 1
        if not self._num_holders[place]:
            del self._num_holders[place]
            self._free.append(place)

    def close(self) -> None:
        """Release the memory, except for places that are still read or written."""
        self.blocks = self.blocks[:0]
        self._num_opened = 0
        self._free.clear()
