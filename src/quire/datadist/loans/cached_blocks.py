"""Blocks of an owner's prefix cache, which peers may read by the digests of their contents.

Nothing is kept for a reader: the owner may evict blocks at any time. After a reading it checks
that none of the blocks was evicted since the reading began; only then may the reader use the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from quire.datadist.caches.spans import Int64Array
from quire.datadist.loans.loans import BlockPart
from quire.datadist.status import LLMStatusCode, failure

PART_BLOCKS = 64
"""Blocks that are sent at a time: fewer are sent for nothing if one has been given up."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A block from the moment it is cached to the moment it is given up: the same one only if identical."""

    block_id: int


class CachedBlocks:
    """What is cached. The owner's thread says so; any thread may look and read."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}  # by digest; single operations need no lock

    def add(self, digest: bytes, block_id: int) -> None:
        """Note that a block is complete and can be read."""
        self._entries[digest] = _Entry(block_id)

    def remove(self, digest: bytes) -> None:
        """Note that a block is given up; call it before anything else is written to the block."""
        self._entries.pop(digest, None)

    def clear(self) -> None:
        """Note that all blocks are given up."""
        self._entries = {}

    def count_leading(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks, from the first digest on, can be read."""
        entries = self._entries
        return next((index for index, one in enumerate(digests) if one not in entries), len(digests))

    def open(self, digests: Sequence[bytes], block_bytes: int) -> CachedReading:
        """Begin to read blocks of `block_bytes` bytes each.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST (one of them is not cached).
        """
        found: list[_Entry] = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None:
                raise failure(
                    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
                    f"only the first {len(found)} of {len(digests)} requested blocks are cached",
                )
            found.append(entry)
        return CachedReading(self, digests, found, block_bytes)

    def _holds(self, digests: Sequence[bytes], found: Sequence[_Entry]) -> bool:
        entries = self._entries
        return all(entries.get(digest) is entry for digest, entry in zip(digests, found, strict=True))


class CachedReading:
    """One reader's way through cached blocks."""

    def __init__(
        self, cached: CachedBlocks, digests: Sequence[bytes], found: Sequence[_Entry], block_bytes: int
    ) -> None:
        self._cached = cached
        self._digests = digests
        self._found = found
        self._block_bytes = block_bytes

    def parts(self, deadline: float, is_wanted: Callable[[], bool]) -> Iterator[BlockPart]:
        """Yield what is to be read; all of it is there, so that nothing is waited for.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST (a block of the next part has been given up).
        """
        for first in range(0, len(self._found), PART_BLOCKS):
            num_blocks = min(PART_BLOCKS, len(self._found) - first)
            self._require_held(slice(first, first + num_blocks))  # to look at all each time takes seconds
            yield BlockPart(first, num_blocks, 0, self._block_bytes)

    def block_ids(self, part: BlockPart) -> Int64Array:
        """Return the owner's numbers of a part's blocks."""
        entries = self._found[part.first_block : part.first_block + part.num_blocks]
        return np.array([entry.block_id for entry in entries], dtype=np.int64)

    def require_held(self) -> None:
        """Raise `LLMException` (LLM_KV_CACHE_NOT_EXIST) if one of the blocks has been given up."""
        self._require_held(slice(None))

    def close(self) -> None:
        """End the reading; nothing was kept for it."""

    def _require_held(self, blocks: slice) -> None:
        """Do as `require_held` says, for some of the blocks."""
        if not self._cached._holds(self._digests[blocks], self._found[blocks]):
            raise failure(
                LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "a cached block was evicted before it was read"
            )
