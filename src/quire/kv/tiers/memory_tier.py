"""A tier in host memory."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.residents import ResidentBlocks
from quire.kv.tiers.tier import BlockTier


class MemoryTier(BlockTier):
    """Keeps blocks in arrays, which are allocated as they are needed and end with the process.

    Args:
        capacity_bytes: maximum number of bytes to keep.
        bytes_per_block: of keys and values.
        min_uses: uses of a block after which it is stored.
    """

    def __init__(self, capacity_bytes: int, bytes_per_block: int, *, min_uses: int) -> None:
        residents = ResidentBlocks(capacity_bytes // bytes_per_block, min_uses)
        super().__init__(residents, bytes_per_block, bytes_per_block)
        self._contents: dict[int, tuple[BlockKey, ByteArray]] = {}  # by place; no array is written to twice

    @override
    def read(self, key: BlockKey, into: ByteArray) -> bool:
        place = self.residents.place_of(key)
        found = None if place is None else self._contents.get(place)
        if found is None or found[0] != key:
            return False
        np.copyto(into, found[1])
        return True

    @override
    def write(self, key: BlockKey, content: ByteArray, generation: int) -> bool:
        place = self.residents.open_place(key, generation)
        if place is None:
            return False
        self._contents.pop(place, None)  # before the new one takes memory
        self._contents[place] = key, content.copy()
        self.residents.fill(key, place, generation)
        return True
