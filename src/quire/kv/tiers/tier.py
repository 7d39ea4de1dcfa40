"""The interface of KV tiers, and the tier in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np
from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.residents import ResidentBlocks


class BlockTier(ABC):
    """A bounded store of blocks of one size.

    `read` may be called by several threads at once; `write`, `refresh` and `close` by one at a time; `clear`
    and what `residents` offers by any thread at any time.

    Args:
        residents: the index, with one place for each block that fits.
        bytes_per_block: bytes per block of keys and values.
        bytes_per_place: that a place takes up.
    """

    is_searched = False
    """Whether `residents` has blocks of other processes only after a `search`."""

    def __init__(self, residents: ResidentBlocks, bytes_per_block: int, bytes_per_place: int) -> None:
        self.residents = residents
        self.bytes_per_block = bytes_per_block
        self.bytes_per_place = bytes_per_place

    @property
    def is_readable(self) -> bool:
        """Whether blocks can be read at present."""
        return True

    @property
    def is_writable(self) -> bool:
        """Whether blocks can be stored."""
        return True

    @property
    def num_memory_hits(self) -> int:
        """Blocks that were read from the memory in front of a slower tier, whether needed or not."""
        return 0

    def count_in_memory(self, keys: Iterable[BlockKey]) -> int:
        """Return how many of `keys` are in the memory in front of a slower tier."""
        return 0

    def search(self, keys: Sequence[BlockKey], num_pieces: int) -> Future[None]:
        """Begin to look for the blocks of a prefix, so that `residents` has those that are there.

        If states have pieces, it has those of a deepest state, too.
        """
        raise NotImplementedError

    @abstractmethod
    def read(self, key: BlockKey, into: ByteArray) -> bool:
        """Read a block into an array of `bytes_per_block` bytes.

        Returns:
            False if it is not, or no longer, there as it was stored; `into` then holds anything.
        """

    def prefetch(self, key: BlockKey) -> None:  # noqa: B027 - memory is fast enough
        """Begin to fetch a block that will be read soon, without waiting for it."""

    def check(self, key: BlockKey) -> None:  # noqa: B027 - memory is not damaged
        """Check cheaply whether a block is still there; forget it if it is not."""

    @abstractmethod
    def write(self, key: BlockKey, content: ByteArray, generation: int) -> bool:
        """Store a block, at the cost of the least recently used ones; return whether that was possible.

        Args:
            key: key of the block; nothing happens if it is stored already.
            content: its `bytes_per_block` bytes.
            generation: of `residents` when `content` was read from the cache; nothing happens if it is over.
        """

    def refresh(self) -> None:  # noqa: B027 - a tier may belong to one process
        """Notice changes that other processes have made to the tier; called every few seconds."""

    def clear(self) -> None:
        """Forget everything: what was stored before is never found again, by any process that uses this."""
        self.residents.clear()

    def close(self) -> None:  # noqa: B027 - memory is let go of by itself
        """Close all files."""


class MemoryTier(BlockTier):
    """Keeps blocks in arrays, which are allocated as they are needed and end with the process.

    Args:
        capacity_bytes: maximum number of bytes to keep.
        bytes_per_block: bytes per block of keys and values.
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
