"""The free blocks without content, in the order in which they are handed out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.step import IntArray


class BlankBlocks:
    """A stack of up to `num_blocks` block ids in one array: pushing and popping cost what is moved."""

    def __init__(self, num_blocks: int) -> None:
        self._ids = np.empty(num_blocks, dtype=np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[: self._count].tolist())

    def push(self, block_ids: IntArray) -> None:
        """Add blocks on top, the last given uppermost."""
        end = self._count + len(block_ids)
        self._ids[self._count : end] = block_ids
        self._count = end

    def push_below(self, block_ids: IntArray) -> None:
        """Add blocks at the bottom, which moves all others."""
        end = self._count + len(block_ids)
        self._ids[len(block_ids) : end] = self._ids[: self._count].copy()
        self._ids[: len(block_ids)] = block_ids
        self._count = end

    def pop(self, count: int) -> IntArray:
        """Remove `count` blocks from the top, or all if there are fewer; the uppermost comes last."""
        start = max(self._count - count, 0)
        popped: IntArray = self._ids[start : self._count].copy()
        self._count = start
        return popped

    def next(self, count: int) -> IntArray:
        """Return the `count` uppermost blocks, the uppermost first, or all if there are fewer."""
        top: IntArray = self._ids[max(self._count - count, 0) : self._count][::-1].copy()
        return top
