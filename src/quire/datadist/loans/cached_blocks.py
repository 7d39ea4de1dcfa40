"""Blocks of an owner's prefix cache, which peers may read by content digest.

Readers hold nothing: the owner may evict blocks at any time. After a reading, it checks that no block was
evicted since the reading began; only then may the reader use the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from quire.datadist.caches.spans import Int64Array
from quire.datadist.loans.loans import BlockPart
from quire.datadist.status import LLMStatusCode, failure

PART_BLOCKS = 64
"""Blocks sent at a time: few, so that little is sent in vain after an eviction."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A block while it is cached; compared by identity."""

    block_id: int


class CachedBlocks:
    """The cached blocks, updated by the owner's thread and read by any thread."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}  # by digest; single operations need no lock

    def add(self, digest: bytes, block_id: int) -> None:
        """Note that a block is complete and can be read."""
        self._entries[digest] = _Entry(block_id)

    def remove(self, digest: bytes) -> None:
        """Note that a block is evicted, before it is overwritten."""
        self._entries.pop(digest, None)

    def clear(self) -> None:
        """Note that all blocks are evicted."""
        self._entries = {}

    def count_leading(self, digests: Sequence[bytes]) -> int:
        """Return how many leading digests are cached."""
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
    """One reading of cached blocks."""

    def __init__(
        self, cached: CachedBlocks, digests: Sequence[bytes], found: Sequence[_Entry], block_bytes: int
    ) -> None:
        self._cached = cached
        self._digests = digests
        self._found = found
        self._block_bytes = block_bytes

    def parts(self, deadline: float, is_wanted: Callable[[], bool]) -> Iterator[BlockPart]:
        """Yield the parts to read, without waiting, as all are cached.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST (a block of the next part has been evicted).
        """
        for first in range(0, len(self._found), PART_BLOCKS):
            num_blocks = min(PART_BLOCKS, len(self._found) - first)
            self._require_held(slice(first, first + num_blocks))  # checking all would take seconds
            yield BlockPart(first, num_blocks, 0, self._block_bytes)

    def block_ids(self, part: BlockPart) -> Int64Array:
        """Return the owner's ids of a part's blocks."""
        entries = self._found[part.first_block : part.first_block + part.num_blocks]
        return np.array([entry.block_id for entry in entries], dtype=np.int64)

    def require_held(self) -> None:
        """Raise `LLMException` (LLM_KV_CACHE_NOT_EXIST) if a block has been evicted."""
        self._require_held(slice(None))

    def close(self) -> None:
        """End the reading; has no effect, as it holds nothing."""

    def _require_held(self, blocks: slice) -> None:
        """Like `require_held`, for some of the blocks."""
        if not self._cached._holds(self._digests[blocks], self._found[blocks]):
            raise failure(
                LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "a cached block was evicted before it was read"
            )
