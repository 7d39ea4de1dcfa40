"""Blocks of an owner's prefix cache, which peers may read by content digest.

Readers hold nothing: the owner may evict blocks at any time. After a reading, it checks that no block was
evicted since the reading began; only then may the reader use the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from quire.datadist.caches.spans import Int64Array
from quire.datadist.loans.arriving_blocks import NO_BLOCK
from quire.datadist.loans.loans import BlockPart
from quire.datadist.status import LLMStatusCode, failure

PART_BLOCKS = 64
"""Blocks sent at a time: few, so that little is sent in vain after an eviction."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A block while it is cached; compared by identity."""

    block_id: int


_NOT_READ = _Entry(NO_BLOCK)
_Row = list[_Entry]  # of one block, in each group


class CachedBlocks:
    """The cached blocks, updated by the owner's thread and read by any thread.

    Of a prefix, the first group has all blocks, and the others those that the tokens behind it see.

    Args:
        blocks_in_windows: of each group but the first, how many of a prefix's last blocks are read.
        state_behind: given the digest of a prefix's last block, returns those of the blocks that have to be
            read with it; none by default.
    """

    def __init__(
        self,
        blocks_in_windows: Sequence[int] = (),
        state_behind: Callable[[bytes], Sequence[bytes]] = lambda _digest: (),
    ) -> None:
        self._in_windows = tuple(blocks_in_windows)
        self._state_behind = state_behind
        # by group and digest; single operations need no lock
        self._entries: list[dict[bytes, _Entry]] = [{} for _ in range(1 + len(self._in_windows))]

    def add(self, digest: bytes, block_id: int, group: int = 0) -> None:
        """Note that a block of a group is complete and can be read."""
        self._entries[group][digest] = _Entry(block_id)

    def remove(self, digest: bytes, group: int = 0) -> None:
        """Note that a block of a group is evicted, before it is overwritten."""
        self._entries[group].pop(digest, None)

    def clear(self, group: int = 0) -> None:
        """Note that all blocks of a group are evicted."""
        self._entries[group] = {}

    def count_leading(self, digests: Sequence[bytes]) -> int:
        """Return how many leading digests are cached, if all groups serve that prefix, with its state."""
        first, *others = self._entries
        num_served, num_adjacent = 0, [0] * len(others)  # blocks of each group up to here
        for count, digest in enumerate(digests, 1):
            if digest not in first:
                break
            num_adjacent = [
                number + 1 if digest in group else 0
                for number, group in zip(num_adjacent, others, strict=True)
            ]
            pairs = zip(num_adjacent, self._in_windows, strict=True)
            if all(number >= min(count, in_window) for number, in_window in pairs):
                num_served = count
        while num_served and not all(map(first.__contains__, self._state_behind(digests[num_served - 1]))):
            num_served -= 1
        return num_served

    def open(self, digests: Sequence[bytes], block_bytes: int) -> CachedReading:
        """Begin to read blocks of `block_bytes` bytes each.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST (one of them is not cached).
        """
        found: list[_Row] = []
        for left, digest in zip(range(len(digests), 0, -1), digests, strict=True):
            row = self._look_up(digest, left)
            if row is None:
                raise failure(
                    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
                    f"only the first {self.count_leading(digests)} of {len(digests)} requested blocks are "
                    "cached",
                )
            found.append(row)
        return CachedReading(self, digests, found, block_bytes)

    def _look_up(self, digest: bytes, left: int) -> _Row | None:
        """Return the entries of a block, the `left`-th from the end, in all groups; None: one is missing."""
        row = []
        for group, in_window in zip(self._entries, (left, *self._in_windows), strict=True):
            entry = group.get(digest) if left <= in_window else _NOT_READ
            if entry is None:
                return None
            row.append(entry)
        return row

    def _holds(self, digests: Sequence[bytes], found: Sequence[_Row]) -> bool:
        return all(
            group.get(digest) is entry
            for digest, row in zip(digests, found, strict=True)
            for group, entry in zip(self._entries, row, strict=True)
            if entry is not _NOT_READ
        )


class CachedReading:
    """One reading of cached blocks."""

    def __init__(
        self, cached: CachedBlocks, digests: Sequence[bytes], found: Sequence[_Row], block_bytes: int
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
        """Return the owner's ids of a part's blocks, of each group [G, N]."""
        rows = self._found[part.first_block : part.first_block + part.num_blocks]
        return np.array([[entry.block_id for entry in row] for row in rows], dtype=np.int64).T

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
