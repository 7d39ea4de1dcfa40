"""A tier whose blocks that were read or written last are in host memory, too, and found there first."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from typing_extensions import override

from quire.kv.block_hash import BlockKey
from quire.kv.host_blocks import ByteArray
from quire.kv.tiers.tier import BlockTier


class CachedTier(BlockTier):
    """Writes blocks to both, and has no block that the tier does not have.

    Args:
        tier: a slower one.
        capacity_bytes: maximum number of bytes to keep in memory; a block for each thread that reads or
            writes comes on top while it does.
    """

    def __init__(self, tier: BlockTier, capacity_bytes: int) -> None:
        super().__init__(tier.residents, tier.bytes_per_block, tier.bytes_per_place)
        self._tier = tier
        self._max_blocks = capacity_bytes // tier.bytes_per_block
        self._lock = threading.Lock()
        self._contents: OrderedDict[BlockKey, ByteArray] = OrderedDict()  # no array is written to twice
        self._num_memory_hits = 0

    @property
    @override
    def num_memory_hits(self) -> int:
        return self._num_memory_hits

    @property
    @override
    def is_writable(self) -> bool:
        return self._tier.is_writable

    @override
    def read(self, key: BlockKey, into: ByteArray) -> bool:
        generation = self.residents.generation
        with self._lock:
            content = self._contents.get(key)
            if content is not None:
                self._contents.move_to_end(key)
                self._num_memory_hits += 1
        if content is not None:
            np.copyto(into, content)
            return True
        if not self._tier.read(key, into):
            return False
        self._keep(key, into, generation)
        return True

    @override
    def prefetch(self, key: BlockKey) -> None:
        if key not in self._contents:
            self._tier.prefetch(key)

    @override
    def write(self, key: BlockKey, content: ByteArray, generation: int) -> bool:
        is_written = self._tier.write(key, content, generation)
        if is_written:
            self._keep(key, content, generation)
        return is_written

    def _keep(self, key: BlockKey, content: ByteArray, generation: int) -> None:
        copy = content.copy()
        with self._lock:
            if generation != self.residents.generation:
                return
            self._contents[key] = copy
            self._contents.move_to_end(key)
            while len(self._contents) > self._max_blocks:
                self._contents.popitem(last=False)

    @override
    def refresh(self) -> None:
        self._tier.refresh()

    @override
    def clear(self) -> None:
        self._tier.clear()
        self._forget()

    @override
    def close(self) -> None:
        self._tier.close()
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._contents.clear()
